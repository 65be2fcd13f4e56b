"""Every kind of `fathomlm eval`, `analyze`, `simulate` and `plan` runs on tiny models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cli.judge_server import GOOD, Said, judge
from fathomlm.cli.main import COMMANDS, main
from fathomlm.lab.simulate import thesis
from jsonl import write_jsonl
from lab.analyze.test_scaling import write_run
from lab.analyze.tiny import model_of, saved, text_file

pytestmark = pytest.mark.usefixtures("one_thread", "short")
FEW = ["--prompts", "1", "--max-new-tokens", "4"]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_jsonl(path, rows))


def commands(place: Path, url: str) -> list[list[str]]:
    """In an order in which later ones find what earlier ones wrote."""
    looped = str(saved(model_of(None), place / "looped"))
    plain = str(saved(model_of(None, sharing="cycle", recursions=1), place / "plain"))
    routed = str(saved(model_of("expert"), place / "routed"))
    text = text_file(place)
    words = lines(place / "words.jsonl", [{"context": "six fathoms", "target": "deep"}] * 2)
    asked = lines(place / "asked.jsonl", [{"context": "a fox.", "question": "who?", "answers": ["a fox"]}] * 2)
    for hidden, loss in ((16, 3.2), (32, 3.0), (64, 3.1)):
        write_run(place / "runs" / str(hidden), hidden, loss)
    runs, texts = str(place / "runs"), str(place / "texts.jsonl")
    sizes = ["--budget", "2e18", "--gpu-memory", "24GB", "--models", "smollm-135m"]
    return [
        ["eval", "tasks", looped, "--tasks", words, "--exit", "recursion"],
        ["eval", "ppl", looped, "--data", text],
        ["eval", "generate", looped, "--data", asked, "--max-new-tokens", "4", "--decode", "parallel", "--exit-layer", "3",
         "--out", texts],
        ["eval", "judge", texts, "--base-url", url, "--model", "tiny"],
        ["eval", "frontier", looped, "--data", text, "--sweep", "depth", *FEW, "--repeats", "1"],
        ["analyze", "routing", routed, "--data", text, "--rows", "2"],
        ["analyze", "kv", looped, "--data", text, "--tokens", "64"],
        ["analyze", "exits", looped, "--data", text, "--tokens", "64", *FEW],
        ["analyze", "weights", plain, "--recursions", "2"],
        ["analyze", "runs", runs],
        ["simulate", "throughput", "--preset", "40gb/gemma-2b/2", "--depths", "1,0.5", "--requests", "40"],
        ["simulate", "thesis", "--table", "40gb", "--sequences", "5"],
        ["simulate", "validate", looped, "--dummy", "--workload", "64-256", "--requests", "3", "--batch-size", "2",
         "--rounds", "1", "--within", "1000"],
        ["plan", *sizes, "--runs", runs, "--out", str(place / "fits.png")],
    ]  # fmt: skip


def test_every_kind_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row for row in thesis.all_printed("40gb") if row.model == "gemma-2b"]
    few = [row for row in rows if row.blocks == 1 or row.name.endswith("/2")]
    monkeypatch.setattr(thesis, "all_printed", lambda table: few)
    seconds = {}
    with judge(lambda prompt, before: Said(GOOD)) as server:
        for words in commands(tmp_path, server.url):
            begun = time.perf_counter()
            assert main([*words, "--json"]) == 0, capsys.readouterr().err
            json.loads(capsys.readouterr().out)
            seconds[" ".join(words[: 1 if words[0] == "plan" else 2])] = time.perf_counter() - begun
    kinds = [f"{group} {kind}" for group in ("eval", "analyze", "simulate") for kind in COMMANDS[group].kinds]
    assert set(seconds) == {*kinds, "plan"}
    print(json.dumps({name: round(each, 2) for name, each in seconds.items()}))
