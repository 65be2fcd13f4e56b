"""`fathomlm analyze exits | weights | runs`: directories that appear whole, a table or a record, one line for a mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config

from fathomlm.cli.main import main
from fathomlm.train.data.tokenizers import byte_tokenizer
from jsonl import write_jsonl
from lab.analyze.tiny import model_of, saved, text_file
from parity import t5_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(None), tmp_path_factory.mktemp("models") / "looped"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(None, sharing="cycle", recursions=1), tmp_path_factory.mktemp("models") / "plain"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of("expert"), tmp_path_factory.mktemp("models") / "routed"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return text_file(tmp_path)


@pytest.fixture
def mistake(mistake_of: Any) -> Any:
    return partial(mistake_of, "analyze")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_exits_of_an_encoder_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shape = {**t5_models.SHAPE, "vocab_size": 257, "eos_token_id": 256}
    monkeypatch.setitem(t5_models.CONFIGS, "t5", lambda: T5Config(**shape))
    t5_models.write_tiny_t5("t5", tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    (tmp_path / "rows.jsonl").write_text('{"text": "deep water"}\n' * 3)
    words = ["--data", str(tmp_path / "rows.jsonl"), "--tokens", "8", "--prompts", "1", "--max-new-tokens", "4"]
    capsys.readouterr()
    assert main(["analyze", "exits", str(tmp_path / "t5"), *words, "--out", str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rows"], record["layers"][-1]["accuracy"]) == (2, 1.0)
    assert [mode["tokens"] for mode in record["breakdown"]["modes"]] == [3, 3, 3]


@pytest.mark.usefixtures("coarse_figures")
def test_exits(looped: str, data: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "exits"
    options = ["--tokens", "64", "--prompts", "1", "--max-new-tokens", "4", "--out", str(out)]
    assert main(["analyze", "exits", looped, "--data", data, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for shown in ("settled", "layer 3", "layer 5", "state copying", "feed-forward"):
        assert shown in printed.out
    assert names(out) == ["confidence.png", "exits.json", "index.html", "layers.png", "times.png"]
    record = json.loads((out / "exits.json").read_text())
    assert (record["kind"], record["context"], len(record["layers"])) == ("exits", 64, 8)
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64") == 3
    assert "<script" not in page


def test_exits_as_a_record_without_times(looped: str, data: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "exits"
    options = ["--tokens", "32", "--prompts", "0", "--exit-layer", "2", "--confidence", "max", "--out", str(out), "--json"]
    assert main(["analyze", "exits", looped, "--data", data, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["confidence"], record["breakdown"]) == ("max", None)
    assert [fit["layer"] for fit in record["exits"]] == [2]
    assert names(out) == ["confidence.png", "exits.json", "index.html", "layers.png"]
    assert record["files"] == [str(out / name) for name in names(out)]


@pytest.mark.usefixtures("coarse_figures")
def test_weights(plain: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "weights"
    assert main(["analyze", "weights", plain, "--recursions", "2", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["inits"]) == ("4", ["average", "stepwise"])
    assert len(record["kinds"]) == 14
    assert "spectra" not in record
    assert names(out) == ["energy.png", "index.html", "ranks.png", "weights.json"]
    assert len(json.loads((out / "weights.json").read_text())["spectra"]) == 2 * 7 * 8


@pytest.mark.usefixtures("coarse_figures")
def test_runs(tmp_path: Path, capsys: Any) -> None:
    for number, name in enumerate(("a", "b")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        same = {"seconds": 1.0, "flops": 1e9}
        train = [
            {"kind": "train", "step": s, "tokens": 10 * s, "loss": 5 - s + number, "lr": 0.1, "grad_norm": 1.0, **same}
            for s in (1, 2)
        ]
        last = {"kind": "validation", "step": 2, "tokens": 20, "loss": 3.25 + number, "exits": {"4": 3.5}, **same}
        write_jsonl(run / "metrics.jsonl", (*train, last))
    out = tmp_path / "out"
    assert main(["analyze", "runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "3.2500" in capsys.readouterr().out
    assert names(out) == ["exits.png", "grad_norm.png", "index.html", "losses.png", "lr.png", "runs.json"]
    record = json.loads((out / "runs.json").read_text())
    assert [each["validation"] for each in record["summaries"]] == [3.25, 4.25]
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64") == 4
    assert "gradient norm" in page


def test_mistakes_are_one_line(
    looped: str, plain: str, routed: str, data: str, tmp_path: Path, mistake: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    exits = partial(mistake, "exits")
    assert "required: --data" in exits(looped)
    assert "a routed model has no exits" in exits(routed, "--data", data)
    assert "must be between 1 and 7 for this model's 8 layers, got 8" in exits(looped, "--data", data, "--exit-layer", "8")
    assert "invalid --confidence 'hope'" in exits(looped, "--data", data, "--confidence", "hope")
    assert "condition must be" in exits(looped, "--data", data, "--condition", "2")
    assert "must be >= 2, got 1" in exits(looped, "--data", data, "--tokens", "1")
    assert "leaves no room for a prompt" in exits(looped, "--data", data, "--tokens", "32", "--max-new-tokens", "64")
    weights = partial(mistake, "weights")
    assert "was converted already" in weights(looped)
    assert "nothing is tied" in weights(plain, "--recursions", "1")
    assert "3 recursions do not divide 8 layers" in weights(plain, "--recursions", "3")
    assert "invalid --init 'best'" in weights(plain, "--init", "best")
    assert "there is no run at nowhere" in mistake("runs", "nowhere")
    assert "invalid --x 'cats'; choose from tokens, steps, time, flops" in mistake("runs", "nowhere", "--x", "cats")
    assert not (tmp_path / "analysis").exists()
