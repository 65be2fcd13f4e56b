"""Healing: which teacher layer teaches which step, the loss against its definition, and runs that learn by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import native_config
from fathomlm.depth import DepthPlan
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.train.estimate import estimate
from fathomlm.train.losses.layerwise import healing_loss, teacher_steps
from fathomlm.train.objective import Objective
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import DistillRecipe, HealRecipe, LossRecipe, Recipe
from fathomlm.train.run import train

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[..., Recipe]
TOKENS = torch.arange(48).view(2, 24) * 7 % 256
LOSS = LossRecipe(distill=DistillRecipe(source="x"), heal=HealRecipe())


@pytest.mark.parametrize(
    ("plan", "kept", "expected"),
    [
        (DepthPlan.build("cycle", 2, 6), None, (0, 1, 2, 3, 4, 5)),
        (DepthPlan.build("cycle", 3, 7, "drop"), None, (0, 1, 2, 4, 5, 6)),
        (DepthPlan.vanilla(3), (0, 1, 5), (0, 4, 5)),
        (DepthPlan.vanilla(3), (0, 1, 3), (0, 2, 5)),  # the last one answers for all that were behind it
        (DepthPlan.build("cycle", 2, 4), (0, 2, 3, 5), (1, 2, 4, 5)),
    ],
)
def test_teacher_steps(plan: DepthPlan, kept: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    layers = 7 if plan.base_layers == 7 else 6
    assert teacher_steps(plan, DepthPlan.vanilla(layers), kept) == expected


@pytest.mark.parametrize(
    ("plan", "teacher", "kept"),
    [
        (DepthPlan.vanilla(4), DepthPlan.vanilla(6), None),
        (DepthPlan.vanilla(2), DepthPlan.vanilla(6), (0, 1, 5)),
        (DepthPlan.vanilla(3), DepthPlan.vanilla(5), (0, 1, 5)),
        (DepthPlan.build("cycle", 2, 6), DepthPlan.build("cycle", 2, 6), None),
    ],
)
def test_a_teacher_must_be_what_the_student_was_made_from(plan: DepthPlan, teacher: DepthPlan, kept: Any) -> None:
    with pytest.raises(OptionError, match="the plain model that the student was made from"):
        teacher_steps(plan, teacher, kept)


def test_the_loss_is_relative_by_token_and_counts_targets_only() -> None:
    generator = torch.Generator().manual_seed(0)
    s, t = torch.randn(2, 3, 2, 5, 4, generator=generator)
    counted = torch.ones(2, 5)
    counted[1, 3:] = 0
    expected = 0.0
    for a, b in zip(s, t, strict=True):
        for row in range(2):
            for token in range(5 if row == 0 else 3):
                error = (a[row, token] - b[row, token]).norm() ** 2 / b[row, token].norm() ** 2
                expected += error.item() / 3
    assert healing_loss(list(s), list(t), counted).item() == pytest.approx(expected, rel=1e-5)


def test_a_model_that_lost_nothing_has_nothing_to_heal(teacher: Path) -> None:
    base = fathomlm.load(teacher)
    same = fathomlm.convert(base, drop=0)
    objective = Objective(same.decoder, LOSS, teacher=base.decoder, kept_layers=same.config.kept_layers)
    _, parts = objective(TOKENS, TOKENS)
    found = dict(zip(objective.names, parts.tolist(), strict=True))
    assert found["heal"] == 0.0
    full = fathomlm.convert(base, relax="lora", rank=64)
    objective = Objective(full.decoder, LOSS, teacher=base.decoder)
    assert dict(zip(objective.names, objective(TOKENS, TOKENS)[1].tolist(), strict=True))["heal"] < 1e-6
    tied = fathomlm.convert(base)
    objective = Objective(tied.decoder, LOSS, teacher=base.decoder)
    total, parts = objective(TOKENS, TOKENS)
    found = dict(zip(objective.names, parts.tolist(), strict=True))
    assert found["heal"] > 1.0
    assert total.item() == pytest.approx(sum(found.values()), rel=1e-5)


def test_alone_no_head_is_computed(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = fathomlm.load(teacher)
    alone = LossRecipe(distill=DistillRecipe(source="x"), heal=HealRecipe(weight=3.0, alone=True))
    objective = Objective(fathomlm.convert(base).decoder, alone, teacher=base.decoder)
    expected = dict(zip(objective.names, objective.eval()(TOKENS, TOKENS)[1].tolist(), strict=True))["heal"]
    called: list[int] = []
    monkeypatch.setattr("fathomlm.train.objective.head_loss", lambda *_, **__: called.append(1))
    total, _ = objective.train()(TOKENS, TOKENS)
    assert not called
    assert total.item() == pytest.approx(3 * expected, rel=1e-5)
    total.backward()
    assert objective.decoder.norm.weight.grad is not None


def test_the_dry_run_counts_it(recipe: Make, teacher: Path) -> None:
    without = estimate(healed(recipe, teacher, loss={"heal": None}))
    joint, alone = (estimate(healed(recipe, teacher, loss={"heal": {"alone": alone}})) for alone in (False, True))
    assert joint.memory.activations > without.memory.activations
    assert alone.work_flops < joint.work_flops == without.work_flops


def healed(recipe: Make, teacher: Path, **changes: Any) -> Recipe:
    model = {"architecture": None, "source": str(teacher), "recursions": 1, "drop": 2, "by": "stepwise"}
    loss = {"distill": {"source": str(teacher)}, "heal": {"weight": 2.0}}
    values: dict[str, Any] = {"budget": {"steps": 12}, "evaluate": {"every": 0, "rows": 8, "first": True}, **changes}
    return recipe(model={**model, **values.pop("model", {})}, loss={**loss, **values.pop("loss", {})}, **values)


def records(made: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(made.directory) / "metrics.jsonl").read_text().splitlines()]


def test_alone_it_learns_the_teachers_states(recipe: Make, teacher: Path) -> None:
    made = healed(recipe, teacher, loss={"heal": {"alone": True}})
    train(made)
    steps = [record for record in records(made) if record["kind"] == "train"]
    assert all(set(record["parts"]) == {"heal"} for record in steps)
    assert steps[-1]["parts"]["heal"] < 0.9 * steps[0]["parts"]["heal"]
    checks = [record for record in records(made) if record["kind"] == "validation"]
    assert all(record["parts"]["next_token"] > 1 and record["parts"]["heal"] > 0 for record in checks)
    assert checks[-1]["parts"]["heal"] < checks[0]["parts"]["heal"]
    trained = fathomlm.load(Path(made.directory) / "last")
    assert trained.config.kept_layers == [0, 3]


def test_with_distillation_and_from_the_first_stage(recipe: Make, teacher: Path, tmp_path: Path) -> None:
    small = fathomlm.convert(str(teacher), drop=2, by="last")
    fathomlm.save(small, tmp_path / "small")
    model = {"source": str(tmp_path / "small"), "drop": None, "by": None}
    made = healed(recipe, teacher, model=model, budget={"steps": 4})
    train(made)
    record = next(record for record in records(made) if record["kind"] == "train")
    parts = record["parts"]
    assert set(parts) == {"next_token", "distill", "heal"}
    assert record["loss"] == pytest.approx(parts["next_token"] + parts["distill"] + 2 * parts["heal"], rel=1e-4)


def test_kept_layers_are_kept_and_checked(teacher: Path, tmp_path: Path) -> None:
    small = fathomlm.convert(str(teacher), drop=1, by="last")
    assert replan(small, small.plan.with_exits((0,))).config.kept_layers == [0, 1, 2]
    fathomlm.save(small, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["kept_layers"] == [0, 1, 2]
    assert fathomlm.load(teacher).config.kept_layers is None
    for bad in ([0, 1], [2, 1, 0], [-1, 0, 1], "all", [0, 1, 1], [0, 1, 2.5]):
        with pytest.raises(CheckpointError, match="kept_layers must be one rising number for each layer"):
            native_config({**config, "kept_layers": bad}, "m")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ({"heal": {}}, r"loss\.heal requires loss\.distill"),
        ({"heal": {}, "distill": {"source": "x"}, "exits": {}}, r"cannot be combined with loss\.exits"),
        ({"heal": {"weight": 0}, "distill": {"source": "x"}}, r"loss\.heal\.weight must be > 0"),
    ],
)
def test_refusals(loss: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        build_recipe({"model": {"source": "x"}, "budget": {"steps": 1}, "batch": {"sequences": 1}, "loss": loss})
