"""Fits of finished runs: a known curve is found again, and what is no valley is not called one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fathomlm.errors import OptionError
from fathomlm.lab.analyze.scaling import FinishedRun, draw_scaling_fits, fit_runs, fit_table, read_finished
from jsonl import write_jsonl

SHAPE = {"family": "llama", "layers": 4, "intermediate": 24, "heads": 2, "kv_heads": 2, "head_dim": 8, "vocab": 64}


def run_of(size: float, loss: float, *, flops: float = 1e18, kind: str = "vanilla") -> FinishedRun:
    tokens = round(flops / (2 * size))
    name = f"{kind}-{size:g}"
    return FinishedRun(
        run=name, architecture=kind, non_embedding_parameters=round(size), flops=flops, tokens=tokens, loss=loss
    )


def valley(size: float, best: float = 3e8) -> float:
    return 2.5 + 0.1 * math.log(size / best) ** 2


def test_a_known_valley_is_found():
    sizes = (1e8, 2e8, 5e8, 1e9)
    (fit,) = fit_runs([run_of(size, valley(size)) for size in reversed(sizes)])
    assert fit.best_parameters == pytest.approx(3e8, rel=1e-6)
    assert fit.best_loss == pytest.approx(2.5)
    assert fit.best_tokens == pytest.approx(1e18 / 6e8, rel=1e-3)
    assert fit.inside is True
    assert fit.sizes == [round(size) for size in sizes]
    assert fit.at(1e9) == pytest.approx(valley(1e9))


def test_budgets_and_architectures_are_fitted_apart():
    runs = [run_of(size, valley(size), flops=1e18 * (1 + 0.01 * i)) for i, size in enumerate((1e8, 3e8, 9e8))]
    runs += [run_of(size, valley(size, 6e8), flops=5e18) for size in (1e8, 3e8, 9e8)]
    runs += [run_of(size, valley(size, 2e8), kind="mor 3") for size in (1e8, 3e8, 9e8)]
    fits = fit_runs(runs)
    assert [(fit.architecture, round(fit.flops / 1e18, 2)) for fit in fits] == [
        ("mor 3", 1.0),
        ("vanilla", 1.01),
        ("vanilla", 5.0),
    ]
    assert [fit.best_parameters for fit in fits] == pytest.approx([2e8, 3e8, 6e8], rel=1e-6)


def test_no_valley_no_best_size():
    (few,) = fit_runs([run_of(1e8, 3.0), run_of(2e8, 2.9)])
    assert (few.coefficients, few.best_parameters, few.inside) == (None, None, None)
    (hill,) = fit_runs([run_of(size, 5 - valley(size)) for size in (1e8, 3e8, 9e8)])
    assert hill.coefficients is not None
    assert hill.best_parameters is None
    (beyond,) = fit_runs([run_of(size, valley(size, 1e10)) for size in (1e8, 3e8, 9e8)])
    assert (beyond.inside, round(beyond.best_parameters / 1e10, 3)) == (False, 1.0)
    shown = [row[4] for row in fit_table([few, hill, beyond])[1:]]
    assert shown == ["too few sizes", "no lowest point", "10B (beyond the runs)"]


def write_run(directory: Path, hidden: int, loss: float, *, model: str = "", validated: bool = True) -> Path:
    directory.mkdir(parents=True)
    shape = ", ".join(f"{key}: {value}" for key, value in {**SHAPE, "hidden": hidden}.items())
    recipe = [f"model: {{architecture: {{{shape}}}{model}}}", "data: {path: none}", "budget: {steps: 10}"]
    (directory / "recipe.yaml").write_text("\n".join([*recipe, "batch: {sequences: 1}"]))
    record = {"step": 10, "tokens": 1000 // hidden, "seconds": 1.0, "flops": 1e9, "loss": loss}
    kinds = ("train", "validation") if validated else ("train",)
    write_jsonl(directory / "metrics.jsonl", ({"kind": kind, **record} for kind in kinds))
    return directory


def test_runs_are_read_with_their_recipes(tmp_path):
    write_run(tmp_path / "runs" / "a", 16, 3.0)
    write_run(tmp_path / "runs" / "b", 16, 3.5, model=", sharing: cycle, recursions: 2")
    plain, looped = read_finished([tmp_path / "runs"])
    assert (plain.architecture, looped.architecture) == ("vanilla", "recursive 2")
    assert (plain.loss, plain.flops) == (3.0, 1e9)
    layer = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert (plain.non_embedding_parameters, looped.non_embedding_parameters) == (4 * layer + 16, 2 * layer + 16)


def test_runs_that_cannot_be_fitted(tmp_path):
    write_run(tmp_path / "unvalidated", 16, 3.0, validated=False)
    with pytest.raises(OptionError, match="never validated"):
        read_finished([tmp_path / "unvalidated"])
    bare = write_run(tmp_path / "bare", 16, 3.0)
    (bare / "recipe.yaml").unlink()
    with pytest.raises(OptionError, match=r"no recipe\.yaml beside its records"):
        read_finished([bare])


def test_the_picture_appears(tmp_path):
    runs = [run_of(size, valley(size)) for size in (1e8, 3e8, 9e8)]
    runs += [run_of(size, valley(size, 4e8) - 0.1, flops=5e18) for size in (1e8, 3e8, 9e8)]
    runs += [run_of(size, valley(size), kind="mor 3") for size in (1e8, 2e8)]
    draw_scaling_fits(fit_runs(runs), tmp_path / "fits.png")
    assert (tmp_path / "fits.png").stat().st_size > 10_000
