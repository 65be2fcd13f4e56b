"""`fathomlm eval ppl MODEL --data FILE`."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.lab.evaluate.scoring import Scorer
from lab.analyze.tiny import model_of, saved

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "a fathom is six feet, and the water is deep é. " * 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model_of(), tmp_path_factory.mktemp("models") / "routed")


@pytest.fixture
def record_of(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*words: str | Path, model: str | Path = tiny_model_dir) -> dict[str, Any]:
        assert main(["eval", "ppl", str(model), *map(str, words), "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        found: dict[str, Any] = json.loads(captured.out)
        return found

    return call


@pytest.fixture
def mistake(mistake_of: Any, tiny_model_dir: Path) -> Callable[..., str]:
    return partial(mistake_of, "eval", "ppl", str(tiny_model_dir))


def test_a_text_file_is_one_document(record_of: Any, data: Path, tiny_model_dir: Path, capsys: Any) -> None:
    record = record_of("--data", data)
    (found,) = record["outputs"]
    assert (record["kind"], record["context"], record["stride"]) == ("ppl", 256, 256)
    assert (found["documents"], found["bytes"]) == (1, len(TEXT.encode()))
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] * found["tokens"] / math.log(2) / found["bytes"])
    assert main(["eval", "ppl", str(tiny_model_dir), "--data", str(data)]) == 0
    shown = capsys.readouterr().out
    assert f"{found['nats_per_token']:.4f}" in shown
    assert f"{found['bits_per_byte']:.4f}" in shown


def test_rows_are_documents_and_may_be_joined(record_of: Any, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"body": text}) + "\n" for text in ("six feet", "", "deep water"))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "whole.txt").write_text("six feet\n\n\n\ndeep water")
    words = ("--data", tmp_path / "rows.jsonl.gz", "--column", "body")
    (apart,) = record_of(*words)["outputs"]
    assert (apart["documents"], apart["bytes"]) == (2, 18)
    (joined,) = record_of(*words, "--join")["outputs"]
    assert joined == record_of("--data", tmp_path / "whole.txt")["outputs"][0]
    assert record_of(*words, "--limit", "1")["outputs"][0]["bytes"] == 8


def test_stride_context_and_outputs(record_of: Any, data: Path, routed: Path) -> None:
    record = record_of("--data", data, "--context", "16", "--stride", "4", "--exit", "recursion", "--batch-size", "3")
    assert [output["output"] for output in record["outputs"]] == ["layer 2 (recursion 1)", "full"]
    assert (record["context"], record["stride"]) == (16, 4)
    assert record["outputs"][0]["nats_per_token"] != record["outputs"][1]["nats_per_token"]
    deep = record_of("--data", data, "--max-depth", "all", model=routed)["outputs"]
    assert deep[2]["nats_per_token"] == record_of("--data", data, model=routed)["outputs"][0]["nats_per_token"]
    assert len({output["nats_per_token"] for output in deep}) == 3


def test_mistakes_are_one_line(mistake: Any, data: Path, tmp_path: Path) -> None:
    here = ("--data", str(data))
    assert "required: --data" in mistake()
    assert "does not exist (did you mean" in mistake("--data", str(tmp_path / "txet.txt"))
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt has no text" in mistake("--data", str(tmp_path / "empty.txt"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "bad.jsonl line 2 is not valid JSON" in mistake("--data", str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"txt": "a"}\n')
    assert "no column 'text' (did you mean 'txt'?)" in mistake("--data", str(tmp_path / "bad.jsonl"))
    assert "<= the model's 256 tokens, got 257" in mistake(*here, "--context", "257")
    assert "from 1 to the window's 8 tokens, got 9" in mistake(*here, "--context", "8", "--stride", "9")
    assert "--stride must be >= 1, got 0" in mistake(*here, "--stride", "0")
    assert "must be between 1 and 3 for this model's 4 layers, got 9" in mistake(*here, "--exit", "9")


def test_an_interrupt_is_one_line(data: Path, tiny_model_dir: Path, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scorer, "score", interrupted)
    assert main(["eval", "ppl", str(tiny_model_dir), "--data", str(data)]) == 2
    assert capsys.readouterr().err == "fathomlm: interrupted; nothing was left half-written\n"
