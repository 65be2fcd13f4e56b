"""`benchmarks/free_tasks_report.py` over lines that were made up: which count, and which setting is chosen by what."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from jsonl import write_jsonl

ROOT = Path(__file__).resolve().parents[3]
SAID = [f"{first} {second} and {third} near the {fourth}" for first, second, third, fourth in (
    ("a", "man", "his dog", "river"), ("two", "girls", "a ball", "house"), ("some", "people", "a car", "market"),
    ("one", "boy", "the horse", "fence"), ("the", "women", "their bikes", "wall"), ("an", "artist", "a child", "gate"),
)]  # fmt: skip


def line(
    kind: str,
    label: str,
    *,
    wrong: int = 0,
    ms: float = 1.0,
    model: str | None = "new",
    variant: str = "calm",
    day: str = "today",
) -> Any:
    """A line of `decode` or `speed`; so many of its texts, from the first on, are wrong."""
    head = {"kind": kind, "task": "translation", "variant": variant, "label": label, "environment": {"date": day}}
    head |= {} if model is None else {"model": model}
    if kind == "speed":
        return head | {"ms_per_token": ms, "ms_per_text": 10 * ms, "exit_rate": 0.5}
    texts = ["nothing of it" if at < wrong else said for at, said in enumerate(SAID)]
    return head | {"texts": texts, "exit_rate": 0.5, "mean_exit_layer": 12.0, "tokens": 60, "unfinished": 0}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import free_tasks_report  # type: ignore[import-not-found]

    return free_tasks_report


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "translation").mkdir(parents=True)
    for split in ("test", "validation"):
        write_jsonl(tmp_path / "data" / "translation" / f"{split}.jsonl", ({"references": [said]} for said in SAID))
    return tmp_path / "data"


def test_of_a_variant_the_last_training_counts(report: Any) -> None:
    before = [line("texts", "full", model=None), line("texts", "oracle", model=None), line("texts", "full", variant="last")]
    again = [line("texts", "full"), line("speed", "full", ms=2.0), line("speed", "full", ms=1.0)]
    found = report.standing([*before, *again])
    assert [(each["variant"], each["label"], each["kind"]) for each in found] == [
        ("last", "full", "texts"), ("calm", "full", "texts"), ("calm", "full", "speed"),
    ]  # fmt: skip
    assert found[-1]["ms_per_token"] == 1.0


def test_what_many_exits_keep_by_every_training_and_by_validation(report: Any, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    lines = []
    for variant, wrong in (("calm", 0), ("calm-seed1", 2)):
        for kind in ("texts", "validation"):
            lines += [line(kind, "full", variant=variant), line(kind, "static 6", variant=variant)]
            lines += [line(kind, "static 5", wrong=wrong + (kind == "validation"), variant=variant)]
        times = (("full", 1.2), ("static 5", 0.6), ("static 6", 0.8))
        lines += [line("speed", label, ms=ms, variant=variant) for label, ms in times]
    write_jsonl(tmp_path / "lines.jsonl", lines)
    results, where = report.read_results(data, [tmp_path / "lines.jsonl"])
    record = report.kept_record(results, where)["translation"]
    assert record["best_at_99"] == "calm, static 5"
    assert record["speedup_at_99"] == 2.0
    first, second = record["best_at_99_kept_by_each_training"]
    assert first == 1.0 > second
    chosen = record["chosen_by_validation"]
    assert (chosen["setting"], chosen["speedup"], chosen["kept"][0]) == ("calm, static 6", 1.5, 1.0)
    text = report.page(results, where | {"device": "none", "torch": "none"})
    assert f"| calm | static 5 | 100.0, {100 * second:.1f} % |" in text
    assert "Chosen by 6 validation texts, of calm, calm-seed1: calm, static 6, 1.50 times, keeps 100.0 % of theirs" in text


def test_speeds_are_against_the_fastest_full_decoding_of_the_day(report: Any, data: Path, tmp_path: Path) -> None:
    """A stall in one model's full decoding makes none of its settings fast, nor does another day's slower machine."""
    pytest.importorskip("sacrebleu")
    lines = [
        line("texts", label, variant=variant) for variant in ("stalled", "other", "before") for label in ("full", "static 5")
    ]
    times = {("stalled", "full"): 9.0, ("stalled", "static 5"): 0.6, ("other", "full"): 1.0, ("other", "static 5"): 0.5}
    lines += [line("speed", label, ms=ms, variant=variant) for (variant, label), ms in times.items()]
    yesterday = {"full": 2.1, "static 5": 1.0}
    lines += [line("speed", label, ms=ms, variant="before", day="yesterday") for label, ms in yesterday.items()]
    write_jsonl(tmp_path / "lines.jsonl", lines)
    results, where = report.read_results(data, [tmp_path / "lines.jsonl"])
    task = results["translation"]
    assert task.speedup("stalled", "static 5", "token") is None
    assert task.against_fastest("stalled", "static 5") == 1.667
    assert task.speedup("other", "static 5", "token") == task.against_fastest("other", "static 5") == 2.0
    assert task.against_fastest("before", "static 5") == 2.1
    record = report.kept_record(results, where)["translation"]
    assert (record["best_at_99"], record["speedup_at_99"]) == ("before, static 5", 2.1)
    assert record["speedup_at_99_against_its_own_full"] == 2.1


def test_the_lines_that_count_are_kept(
    report: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr(report, "picture", lambda *args: None)
    where = {"environment": {"date": "today", "device": "none", "torch": "none"}}
    old, new, kept = tmp_path / "old.jsonl", tmp_path / "new.jsonl", tmp_path / "kept.jsonl.xz"
    write_jsonl(old, [line("texts", "full", model=None) | where, line("texts", "static 5", model=None) | where])
    write_jsonl(new, [line("texts", "full") | where])
    words = ["report", str(data), str(tmp_path / "out"), str(old), str(new), "--keep-lines", str(kept)]
    monkeypatch.setattr(sys, "argv", words)
    report.main()
    found = [json.loads(each) for each in lzma.decompress(kept.read_bytes()).decode().splitlines()]
    assert [(each["label"], each.get("model")) for each in found] == [("full", "new")]
    assert json.loads((tmp_path / "out.json").read_text())["translation"]["speedup_at_99"] is None
    assert "## translation: 6 texts" in capsys.readouterr().out
