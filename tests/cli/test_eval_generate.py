"""`fathomlm eval generate MODEL --data FILE`: quality, latency and exit rate together."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config

from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine import session
from fathomlm.lab.evaluate import generation
from fathomlm.lab.evaluate.samples import squad
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.tokenizers import byte_tokenizer
from jsonl import write_jsonl
from parity import t5_models

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [
    {"context": "the water is deep.", "question": "how deep?", "answers": ["six fathoms", "deep"]},
    {"context": "a fox jumps over a dog.", "question": "who?", "answers": ["a fox"]},
    {"context": "the quick brown fox.", "question": "which?", "answers": ["brown"]},
]
PAIRS = [{"source": f"line {n} is", "references": [f"{n} fathoms", "deep"]} for n in range(3)]
NEW = ("--max-new-tokens", "8")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_jsonl(path, rows))


@pytest.fixture
def run(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def call(*words: str) -> tuple[str, str]:
        assert main(["eval", "generate", str(tiny_model_dir), *words]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture
def mistake(mistake_of: Any, tiny_model_dir: Path) -> Callable[..., str]:
    return partial(mistake_of, "eval", "generate", str(tiny_model_dir))


def test_quality_latency_and_exits_in_one_record(run: Any, tmp_path: Path, tiny_model: FathomForCausalLM) -> None:
    data, out = write(tmp_path / "qa.jsonl", ROWS), tmp_path / "texts.jsonl"
    words = ("--data", data, *NEW, "--decode", "parallel", "--exit-layer", "2", "--threshold", "0.05")
    shown, err = run(*words, "--out", str(out), "--json")
    assert err == ""
    record = json.loads(shown)
    prompts = [f"{row['context']}\nQuestion: {row['question']}\nAnswer:" for row in ROWS]
    exiting = Exiting(mode="parallel", exit_layers=(2,), threshold=0.05)
    expected = [generate(tiny_model, p, max_new_tokens=8, stop=("\n",), exiting=exiting)[0] for p in prompts]
    assert record["quality"] == squad([text.text.strip() for text in expected], [row["answers"] for row in ROWS])  # type: ignore[misc]
    layers = [layer for text in expected for layer in text.exit_layers or ()]
    assert record["exits"]["exit_rate"] == layers.count(2) / len(layers)
    assert (record["exits"]["mode"], record["exits"]["layers"], record["exits"]["last_threshold"]) == ("parallel", 4, 0.05)
    assert record["latency"]["tokens"] == sum(len(text.tokens) for text in expected)
    assert record["latency"]["tokens_per_second"] > 0
    assert (record["metric"], record["texts"], record["sampling"]["stop"]) == ("squad", 3, ["\n"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in lines] == [text.text for text in expected]
    assert lines[0]["references"] == ["six fathoms", "deep"]


@pytest.mark.parametrize("more", [(), ("--decode", "static", "--exit-layer", "2"), ("--batch-size", "2")])
def test_the_reference_says_the_same(more: tuple[str, ...], run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    words = ("--data", write(tmp_path / "squad.jsonl", ROWS), *NEW, *more, "--json")
    fast = json.loads(run(*words)[0])
    monkeypatch.setattr(session, "EngineSession", None)
    slow = json.loads(run(*words, "--reference")[0])
    assert (fast["quality"], fast["exits"]) == (slow["quality"], slow["exits"])
    assert fast["latency"]["tokens"] == slow["latency"]["tokens"]


def test_a_table_for_people(run: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    words = ("--data", data, "--source", "source", "--references", "references", "--metric", "squad", *NEW)
    out, err = run(*words)
    assert err == ""
    for name in ("full depth", "exact_match", "f1", "tokens/s", "ms per token", "tokens per completion"):
        assert name in out
    assert "exited early" not in out
    out, _ = run(*words, "--decode", "oracle", "--exit-layer", "1,2")
    assert "oracle (it knows the last layer's choice)" in out
    assert "exited early" in out
    assert "mean exit layer" in out


def test_rouge_and_bleu_of_named_fields(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    words = ("--data", data, "--prompt", "{source}:\\n", "--references", "references", *NEW, "--json")
    rouge = json.loads(run(*words, "--metric", "rouge", "--limit", "2", "--batch-size", "2")[0])
    assert set(rouge["quality"]) == {"rouge1", "rouge2", "rougeL"}
    assert (rouge["texts"], rouge["batch"], rouge["prompt"]) == (2, 2, "{source}:\n")
    assert set(json.loads(run(*words, "--metric", "bleu")[0])["quality"]) == {"bleu"}


def test_an_encoder_reads_the_source_alone_and_loses_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake_of: Any
) -> None:
    shape = {**t5_models.SHAPE, "vocab_size": 257, "eos_token_id": 256}
    monkeypatch.setitem(t5_models.CONFIGS, "t5", lambda: T5Config(**shape))
    t5_models.write_tiny_t5("t5", tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    data = write(tmp_path / "scitldr.jsonl", [{"document": "deep water", "summaries": ["deep"]}] * 2)
    words = ["--data", data, "--metric", "squad", "--max-source-tokens", "4", *NEW, "--json"]
    capsys.readouterr()
    assert main(["eval", "generate", str(tmp_path / "t5"), *words, "--out", str(tmp_path / "out.jsonl")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompts_cut"] == 2
    expected = generate(load(tmp_path / "t5"), [list(b"deep")], max_new_tokens=8)[0].text
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == [("deep water", expected)] * 2
    capsys.readouterr()
    for flags, decoder in (((), "engine"), (("--reference",), "reference")):
        assert main(["generate", str(tmp_path / "t5"), "-p", "deep", "-p", "water", *NEW, "--json", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["decoder"] == decoder
        assert found["results"][0]["text"] == expected
    task = write(tmp_path / "task.jsonl", [{"context": "a", "target": "b"}])
    assert "takes decoder-only models" in mistake_of("eval", str(tmp_path / "t5"), "--tasks", task)


def test_long_prompts_are_cut_and_said(run: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "long.jsonl", [{"source": "deep water " * 400, "references": "x"}, *PAIRS])
    out, err = run("--data", data, "--metric", "squad", *NEW, "--json")
    assert err == "fathomlm: 1 of 4 prompts were truncated to fit the context\n"
    assert json.loads(out)["prompts_cut"] == 1


def test_mistakes_are_one_line(mistake: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    here = ("--data", data, "--metric", "squad")
    assert "required: --data" in mistake()
    assert "did you mean" in mistake("--data", data.replace("pairs", "paris"), "--metric", "squad")
    assert "has no rows" in mistake("--data", write(tmp_path / "none.jsonl", []), "--metric", "squad")
    (tmp_path / "bad.jsonl").write_text(json.dumps(PAIRS[0]) + "\n{]\n")
    assert "bad.jsonl line 2 is not valid JSON" in mistake("--data", str(tmp_path / "bad.jsonl"), "--metric", "squad")
    (tmp_path / "text.txt").write_text("a")
    assert "rows are read from .jsonl files" in mistake("--data", str(tmp_path / "text.txt"), "--metric", "squad")
    assert "set --metric" in mistake("--data", data)
    assert "unknown metric 'rogue' (did you mean 'rouge'?)" in mistake("--data", data, "--metric", "rogue")
    assert "is missing sauce (did you mean 'source'?)" in mistake(*here, "--source", "sauce")
    assert "--reference takes no value, got 'refs'; --references does" in mistake(*here, "--reference", "refs")
    assert "is missing refs" in mistake(*here, "--references", "refs")
    assert "--threshold requires --decode, such as --decode parallel" in mistake(*here, "--threshold", "0.5")
    assert "invalid --decode 'paralel' (did you mean 'parallel'?)" in mistake(*here, "--decode", "paralel")
    assert "has no exits of its own" in mistake(*here, "--decode", "parallel")
    assert "leaves no room for a prompt" in mistake(*here, "--max-new-tokens", "256")
    assert "--max-source-tokens must be >= 1, got 0" in mistake(*here, "--max-source-tokens", "0")
    assert "--shots must be >= 0, got -1" in mistake(*here, "--shots", "-1")
    assert "3 worked examples requested, but there are only 2" in mistake(*here, "--shots", "3")


def test_an_interrupt_is_one_line(tiny_model_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "decoder_for", lambda *_, **__: interrupted)
    out = tmp_path / "texts.jsonl"
    words = ["--data", write(tmp_path / "pairs.jsonl", PAIRS), "--metric", "squad", "--out", str(out)]
    assert main(["eval", "generate", str(tiny_model_dir), *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fathomlm: interrupted; nothing was left half-written\n")
    assert not out.exists()
