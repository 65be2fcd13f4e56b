from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import DataError
from fathomlm.lab.study.ledger import Ledger, fingerprint, identifying_settings, merge_records, read_records
from fathomlm.train.reading import build_recipe

RECIPE = {
    "model": {"architecture": {"layers": 4}, "recursions": 2, "router": {}},
    "data": {"path": "there"},
    "budget": {"steps": 4},
    "batch": {"sequences": 2},
}


def record(
    variant: str, *, seed: int = 0, status: str = "finished", date: str = "2026-01-01", **more: Any
) -> dict[str, Any]:
    return {
        "study": "small", "variant": variant, "budget": "short", "seed": seed, "fingerprint": f"{variant}{seed}",
        "data": {"mark": "m"}, "status": status, "date": date, **more,
    }  # fmt: skip


def test_merging_is_idempotent_and_has_no_order() -> None:
    records = [
        record("a"), record("a", date="2026-01-02"), record("b", status="failed"), record("b", date="2026-03-01"),
        record("a", seed=1),
    ]  # fmt: skip
    wanted = [record("a"), record("b", date="2026-03-01"), record("a", seed=1)]
    for order in itertools.permutations(records):
        assert merge_records(order) == wanted
    assert merge_records([*wanted, *records, *wanted]) == wanted


def test_files_of_another_machine_are_merged_once(tmp_path: Path) -> None:
    here, there = Ledger(tmp_path / "here"), Ledger(tmp_path / "there")
    here.add("small", [record("a"), record("b", status="failed")])
    there.add("small", [record("b"), record("c")])
    assert here.merge([there.path("small")]) == {"small": 2}
    before = here.path("small").read_bytes()
    assert here.merge([there.path("small"), there.path("small")]) == {"small": 0}
    assert here.path("small").read_bytes() == before
    content = json.loads(before)
    assert [(run["variant"], run["status"]) for run in content["runs"]] == [(v, "finished") for v in "abc"]


def test_a_finished_run_stands_over_one_that_failed_in_another_study_and_corpora_are_kept_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add("a", [record("x", study="a"), record("y", study="a", data={"mark": "n"})])
    ledger.add("b", [record("x", study="b", status="failed")])
    x, y = (record(name)["fingerprint"] for name in "xy")
    assert {mark: one["status"] for mark, one in ledger.standing().items()} == {x: "finished", y: "finished"}
    assert list(ledger.standing("m")) == [x]
    assert list(ledger.standing("n")) == [y]


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, message in (
        ("{", "x.json"),
        ("[]", "x.json"),
        ('{"format": 2}', "not a ledger"),
        ('{"format": 1, "runs": [{}]}', "has no study"),
        (json.dumps({"format": 1, "runs": [record("a", data={})]}), "has no mark of its corpus"),
        (
            json.dumps({"format": 1, "runs": [record("a", fingerprint=["a"])]}),
            "fingerprint of a record of `runs` must be text",
        ),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_records(path)
    with pytest.raises(DataError, match="there is no ledger file"):
        read_records(tmp_path / "none.json")


def test_runs_on_another_corpus_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add("small", [record("a")])
    ledger.check_corpus("m", "corpus", ["small", "other"])
    with pytest.raises(DataError, match="holds runs on another corpus"):
        ledger.check_corpus("n", "corpus", ["small"])


def test_a_fingerprint_is_of_what_decides_the_outcome() -> None:
    one = build_recipe(RECIPE)
    assert identifying_settings(one) == {
        "model": {"architecture": {"layers": 4}, "recursions": 2, "router": {}},
        "budget": {"steps": 4}, "batch": {"sequences": 2},
    }  # fmt: skip
    same = replace(one, name="x", out="y", device="cpu", compile=True, capture=True)
    assert fingerprint(same) == fingerprint(one)
    for change in ({"seed": 1}, {"evaluate": {"rows": 64}}, {"optimizer": {"lr": 1.0}}, {"budget": {"steps": 5}}):
        assert fingerprint(build_recipe(RECIPE | change)) != fingerprint(one)
