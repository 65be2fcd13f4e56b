"""`fathomlm convert --vocab` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fathomlm
from fathomlm.cli.main import main
from lab.analyze.tiny import model_of, saved

TEXT = "the depth of the water is the measure of the line\n" * 20


@pytest.fixture(scope="module")
def base(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = model_of(None, sharing="cycle", recursions=1, traits={"vocab": len(tiny_tokenizer), "context": 128})
    model.tokenizer = tiny_tokenizer
    model.config.eos_token_id = tiny_tokenizer.eos_token_id
    return saved(model, tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    return tmp_path / "text.jsonl"


def trim(base: Path, text: Path, out: Path, *more: str, size: int = 280) -> int:
    given = ["--vocab", str(size), "--vocab-from", str(text), "--vocab-column", "body"]
    return main(["convert", str(base), str(out), *given, *more])


def test_a_trimmed_model_its_card_and_what_is_said(base: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    command = [
        "convert",
        str(base),
        str(tmp_path / "small"),
        "--vocab",
        "280",
        "--vocab-from",
        str(text),
        "--vocab-column",
        "body",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"small: 280 of {fathomlm.load(base).architecture.vocab} tokens" in said
    assert "tokens of the text stay" in said
    assert fathomlm.load(tmp_path / "small").architecture.vocab == 280
    card = (tmp_path / "small" / "README.md").read_text()
    assert "Tokens: 280 of the base's" in card
    assert f"fathomlm convert {tmp_path / 'small'} small-small --drop 4" in card
    assert trim(base, text, tmp_path / "small", "--json", "--force") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["vocab"], record["out"]) == (280, str(tmp_path / "small"))
    assert 0 < record["tokens_kept_share"] < 1 < record["tokens_times"]
    assert record["bytes_share"] < 1


def test_a_model_of_its_tokens_teaches_what_is_made_of_it(base: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    """The two steps that a card names, then a step of the training that the second card names."""
    small, corpus = tmp_path / "small", tmp_path / "corpus"
    assert trim(base, text, small) == 0
    assert main(["convert", str(small), str(tmp_path / "fewer"), "--drop", "4"]) == 0
    lines = "".join(json.dumps({"body": f"{n} fathoms of water. {TEXT}"}) + "\n" for n in range(20))
    (tmp_path / "lines.jsonl").write_text(lines)
    given = ["--tokenizer", str(small), "--column", "body", "--validation-fraction", "0.2"]
    assert main(["data", "prepare", str(tmp_path / "lines.jsonl"), str(corpus), *given]) == 0
    run = ["train", "compress-smollm2-135m", "--model.source", str(tmp_path / "fewer"), "--data.path", str(corpus)]
    run += [f"--model.{name}=null" for name in ("drop", "by", "neurons", "calibrate")]
    run += ["--data.tokenizer", str(small), "--data.context", "64", "--batch.sequences", "2", "--batch.micro", "2"]
    run += ["--budget.tokens", "null", "--budget.steps", "1", "--schedule.warmup", "0", "--precision", "float32"]
    run += ["--compile", "false", "--capture", "false", "--out", str(tmp_path / "run")]
    capsys.readouterr()
    assert main([*run, "--loss.distill.source", str(base)]) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert main([*run, "--loss.distill.source", str(small)]) == 0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--vocab", "280"], "--vocab requires --vocab-from"),
        (["--vocab-from", "TEXT"], "--vocab-from requires --vocab"),
        (["--vocab", "280", "--vocab-from", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--vocab", "0", "--vocab-from", "TEXT"], "--vocab must be >= 1"),
        (["--vocab", "9", "--vocab-from", "TEXT"], r"vocab must be from 259"),
        (
            ["--vocab", "280", "--vocab-from", "TEXT", "--recursions", "2"],
            "cannot be combined with --recursions; trim",
        ),
        (["--vocab", "280", "--vocab-from", "TEXT", "--drop", "1"], "cannot be combined with --drop; trim"),
        (["--vocab", "280", "--vocab-from", "TEXT", "--router", "expert"], "cannot be combined with --router; trim"),
        (["--vocab", "280", "--vocab-from", "TEXT", "--vocab-column", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    base: Path, text: Path, tmp_path: Path, capsys: Any, more: list[str], why: str
) -> None:
    given = [str(text) if each == "TEXT" else each for each in more]
    column = (
        [] if "--vocab-column" in more or "--vocab" not in more or "--vocab-from" not in more else ["--vocab-column", "body"]
    )
    assert main(["convert", str(base), str(tmp_path / "out"), *given, *column]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl"]
