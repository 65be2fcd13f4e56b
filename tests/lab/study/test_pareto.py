"""`benchmarks/pareto.py`: which model is the better choice, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pareto(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pareto  # type: ignore[import-not-found]

    return pareto  # type: ignore[no-any-return]


def model(loss: float, **speeds: int) -> dict[str, Any]:
    return {"loss": loss, "speeds": {size[1:]: {"tokens_per_s": speed} for size, speed in speeds.items()}}


def test_each_model_counts_at_its_best_batch_size(pareto: Any, tmp_path: Path) -> None:
    models = {
        "plain": model(3.0, b32=1000, b256=4000),
        "mor": model(3.1, b32=1500, b256=6000, b512=5500),
        "worse": model(3.2, b32=1600, b256=5900),
    }
    record = {"study": "s", "environment": {"device": "some GPU", "date": "2026-11-18"}, "models": models}
    found = pareto.with_best(record)["models"]
    assert [one["best"]["batch_size"] for one in found.values()] == [256, 256, 256]
    assert [one["on_the_frontier"] for one in found.values()] == [True, True, False]
    (tmp_path / "p.json").write_text(json.dumps(record))
    pareto.draw(tmp_path / "p.json")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_models_that_were_not_kept_are_left_out(pareto: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fathomlm.lab.study.ledger import Ledger
    from fathomlm.lab.study.spec import read_study
    from lab.study.synthetic import fill

    fill(read_study("tiny"), Ledger(tmp_path), lambda job: None if job.run.variant.name == "mor" else 3.0)
    args = type("Args", (), {"study": "tiny", "ledger": tmp_path})
    rows = pareto.rows_of(args)
    assert {(row.variant.name, row.budget.name) for row in rows} == {("plain", "long"), ("recursive", "long")}
    assert pareto.open_kept(rows[0], tmp_path, "cpu") is None
    assert f"{tmp_path / 'tiny' / 'plain-long-seed0' / 'last'}; runs are kept by --keep" in capsys.readouterr().out
