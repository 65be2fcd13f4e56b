"""Claims about texts: read from the ledger's folder, judged by their intervals, told in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import DataError
from fathomlm.lab.study.decoded import read_decoded
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import page, results_of
from fathomlm.lab.study.results import overall
from fathomlm.lab.study.spec import build_study
from lab.study.synthetic import fill


def record(**changes: Any) -> dict[str, Any]:
    def place(mean: float, interval: list[float] | None) -> dict[str, Any]:
        return {"setting": "threshold 0.5", "one": "a, copy", "other": "a, full", "mean": mean, "interval": interval}

    claims = [
        {"text": "Copying is below", "thesis": "tab_free:copying", "after": True, "places": [place(-1.0, [-1.5, -0.2])]},
        {"text": "It is not", "thesis": "tab_free:copying", "places": [place(0.9, [0.1, 2.5]), place(0.1, [-0.5, 0.4])]},
        {"text": "The same", "thesis": "ours", "within": 0.2, "places": [place(0.0, [-0.1, 0.1]), place(0.0, [-0.3, 0.1])]},
        {"text": "Another model", "thesis": "ours", "places": [place(-5.0, None)]},
    ]
    where = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-18"}
    return {"study": "small", "metric": "BLEU", "texts": 500, "environment": where, "claims": claims, **changes}


@pytest.fixture
def ledger(tmp_path: Path) -> Callable[[dict[str, Any]], Ledger]:
    def make(decoded: dict[str, Any]) -> Ledger:
        (tmp_path / "decoded").mkdir(exist_ok=True)
        (tmp_path / "decoded" / "small.json").write_text(json.dumps(decoded), encoding="utf-8")
        return Ledger(tmp_path)

    return make


def test_verdicts_are_those_of_the_intervals(ledger: Any) -> None:
    found = read_decoded(ledger(record()), "small")
    assert found is not None
    verdicts = [each.verdict for each in found.judged()]
    assert verdicts == [
        "confirmed", "refuted", "not resolved at this scale", "confirmed", "not resolved at this scale",
        "not resolved at this scale",
    ]  # fmt: skip


def test_the_report_tells_them_beside_the_studys_own(values: Callable[..., dict[str, Any]], ledger: Any) -> None:
    study = build_study(values(), "test")
    own = ledger(record())
    fill(study, own, lambda job: 3.0)
    (found,) = results_of([study], own)
    text = page([found], Path("results.md"))
    assert text.count(study.claims[0].text) == 2, "in the table of claims and in the section"
    assert "| Copying is below | `tab_free:copying` | small | afterwards | *confirmed* | 1 of 1 |" in text
    assert "**It is not** (`tab_free:copying`): *not resolved at this scale (1 refuted, 1 open)*" in text
    assert "*not resolved at this scale (1 refuted, 1 open)*" in text
    assert "How these models decode: 500 texts, BLEU, NVIDIA H200" in text
    assert "| a, copy - a, full | threshold 0.5 | BLEU | -1.00 (-1.50 to -0.20) | 1 | confirmed | 0.010 |" in text
    assert overall(each for each in found.judged if each.claim.text == "Copying is below") == "confirmed"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"study": "other"}, "is of the study other"),
        ({"texts": "many"}, "texts must be an integer"),
        ({"claims": [{"text": "a", "thesis": "ours"}]}, "missing"),
    ],
)
def test_files_that_are_wrong_are_one_line(changes: dict[str, Any], says: str, ledger: Any) -> None:
    with pytest.raises(DataError, match=says):
        read_decoded(ledger(record(**changes)), "small")


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert read_decoded(Ledger(tmp_path), "small") is None
