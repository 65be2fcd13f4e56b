"""`benchmarks/pareto.py`: which model is the better choice, at full depth and with fewer recursions, and the picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fathomlm.cli.main import main
from fathomlm.errors import OptionError
from fathomlm.lab.study.jobs import Place
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.spec import read_study
from lab.study.synthetic import fill

ROOT = Path(__file__).resolve().parents[3]
Values = Callable[..., dict[str, Any]]


@pytest.fixture
def pareto(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pareto  # type: ignore[import-not-found]

    return pareto


@pytest.fixture
def pages(pareto: Any) -> Any:
    import pareto_page  # type: ignore[import-not-found]

    return pareto_page


@pytest.fixture
def call(pareto: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["pareto.py", *map(str, words)])
        return int(pareto.main())

    return call


def model(loss: float, *limited: tuple[float, int], **speeds: int) -> dict[str, Any]:
    """`limited` are loss and speed at each depth below the full one."""
    about = {"context": 8, "mean_depth": 1.0, "flops_per_token": 10**6}
    depths: list[dict[str, Any]] = [
        {"max_depth": depth, "loss": found, "log_likelihood": -8 * found, "speed": {"tokens_per_s": speed}} | about
        for depth, (found, speed) in enumerate(limited, start=1)
    ]
    depths.append({"max_depth": len(limited) + 1, "loss": loss, "log_likelihood": -8 * loss} | about)
    return {
        "loss": loss, "seeds": [0], "parameters": 10**6, "recursions": len(depths), "depths": depths,
        "speeds": {size[1:]: {"tokens_per_s": speed} for size, speed in speeds.items()},
    }  # fmt: skip


def record_of(**models: Any) -> dict[str, Any]:
    return {"settings": {"study": "s"}, "environment": {"device": "some GPU", "date": "2026-11-18"}, "models": models}


def test_each_model_counts_at_its_best_batch_size(pareto: Any, pages: Any, tmp_path: Path) -> None:
    plain, mor = model(3.0, b32=1000, b256=4000), model(3.1, b32=1500, b256=6000, b512=5500)
    record = pareto.with_best(record_of(plain=plain, mor=mor, worse=model(3.2, b32=1600, b256=5900)))
    found = record["models"]
    assert [one["best"]["batch_size"] for one in found.values()] == [256, 256, 256]
    assert [one["on_the_frontier"] for one in found.values()] == [True, True, False]
    assert [one["depths"][-1]["speed"]["tokens_per_s"] for one in found.values()] == [4000, 6000, 5900]
    assert [row[-1] for row in pages.full_rows(record)[1:]] == ["yes", "yes", "no"]
    assert pages.batch_rows(record)[1:] == [
        ["plain", "1,000", "4,000", "-"], ["mor", "1,500", "6,000", "5,500"], ["worse", "1,600", "5,900", "-"],
    ]  # fmt: skip


def test_every_depth_is_a_point(pareto: Any, pages: Any, tmp_path: Path) -> None:
    plain, mor = model(3.0, b32=4000), model(3.1, (3.5, 9000), (3.2, 5000), b32=6000)
    recursive = model(2.9, (3.3, 0), b32=2000)
    del recursive["depths"][0]["speed"]  # the engine does not limit it
    record = pareto.with_best(record_of(plain=plain, mor=mor, recursive=recursive))
    table = pages.depth_rows(record)
    assert [(row[0], row[1], row[-3], row[-2], row[-1]) for row in table[1:]] == [
        ("plain", "-", "4,000", "1.00", "yes"),
        ("mor", "1 of 3", "9,000", "1.50", "yes"), ("mor", "2 of 3", "5,000", "0.83", "no"),
        ("mor", "3 of 3", "6,000", "1.00", "yes"),
        ("recursive", "1 of 2", "-", "-", "-"), ("recursive", "2 of 2", "2,000", "1.00", "yes"),
    ]  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(record))
    assert pareto.draw_record(tmp_path / "p.json") == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "| mor | 2 of 3 | 3.2000 | -25.6 |" in (tmp_path / "p.md").read_text()


def test_models_that_were_not_kept_are_left_out(pareto: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(read_study("tiny"), Ledger(tmp_path), lambda job: None if job.run.variant.name == "mor" else 3.0)
    rows = pareto.rows_of("tiny", Ledger(tmp_path))
    assert {(row.variant.name, row.budget.name) for row in rows} == {("plain", "long"), ("recursive", "long")}
    assert pareto.open_kept(rows[0], Place(None, tmp_path), "cpu") is None
    assert f"{tmp_path / 'tiny' / 'plain-long-seed0' / 'last'}; runs are kept by --keep" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_from_a_study_to_the_picture(
    values: Values, corpus: Path, tmp_path: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = tmp_path / "small.yaml", tmp_path / "speed.json"
    study.write_text(yaml.safe_dump(values(seeds=[0])))
    where = ["--corpus", corpus, "--ledger", tmp_path / "ledger", "--work", tmp_path / "work"]
    few = ["--batch-sizes", 2, "--rounds", 1, "--mean", 4]
    assert call("run", "--out", out, "--study", study, *where, *few) == 2
    assert "has no finished run" in capsys.readouterr().err
    assert main(["study", "run", str(study), *map(str, where), "--keep", "--device", "cpu"]) == 0

    assert call("run", "--out", out, "--study", study, *where, *few, "--minutes", 0) == 0
    assert "call again to go on" in capsys.readouterr().out
    assert call("run", "--out", out, "--study", study, *where, *few) == 0
    record = json.loads(out.read_text())
    losses = {run["variant"]: run["loss"] for run in Ledger(tmp_path / "ledger").read("small")}
    for name, found in record["models"].items():
        deepest = found["depths"][-1]
        assert found["loss"] == losses[name] == found["ledger_loss_of_the_seed"]
        assert deepest["loss"] == pytest.approx(losses[name], abs=1e-4)  # the same rows
        assert deepest["speed"]["tokens_per_s"] == found["best"]["tokens_per_s"]
    models = record["models"]
    assert [len(models[name]["depths"]) for name in ("plain", "recursive", "mor")] == [1, 2, 2]
    one, full = models["mor"]["depths"]
    assert one["mean_depth"] == one["speed"]["mean_depth"] == 1.0 <= full["mean_depth"]
    assert one["speed"]["tokens_per_s"] > 0
    assert "speed" not in models["recursive"]["depths"][0]
    assert models["recursive"]["depths"][0]["loss"] != models["recursive"]["depths"][1]["loss"]

    assert call("run", "--out", out, "--study", study, *where, *few) == 0  # nothing is left
    assert json.loads(out.read_text()) == record
    assert call("draw", out) == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert call("run", "--out", out, "--study", study, *where, *few, "--mean", 5) == 2
    assert "another settings; --fresh begins anew" in capsys.readouterr().err
    assert call("run", "--out", out, "--study", study, *where[:-1], tmp_path / "elsewhere", *few) == 2
    assert "has no kept model" in capsys.readouterr().err


def test_a_record_without_speeds_is_not_drawn(pages: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no speeds to draw yet"):
        pages.draw(record_of(plain=model(3.0)), tmp_path / "p.png")
