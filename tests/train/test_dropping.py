"""Recipes that drop layers of a source, and that measure it over their corpus first."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.depth import DepthPlan
from fathomlm.depth.dropping import repeated_plan
from fathomlm.errors import OptionError, TrainingError
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.losses.layerwise import teacher_steps
from fathomlm.train.recipe import BudgetRecipe, DistillRecipe, HealRecipe, LossRecipe, Recipe
from fathomlm.train.report import SilentWatcher, measuring
from fathomlm.train.run import train
from fathomlm.train.setup import build_student
from fathomlm.train.student import read_student

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[..., Recipe]


def of(recipe: Make, source: Path, **model: Any) -> Recipe:
    plain = {"architecture": None, "sharing": None, "recursions": 1, "source": str(source)}
    return recipe(model={**plain, **model}, budget={"steps": 2}, loss={"exits": None})


def test_a_dropped_source_trains_and_the_dry_run_knows_its_shape(recipe: Make, teacher: Path) -> None:
    made = of(recipe, teacher, drop=1, by="last")
    assert read_student(made).architecture.layers == 3
    train(made)
    trained = fathomlm.load(Path(made.directory) / "last")
    assert (trained.architecture.layers, trained.plan.recursions) == (3, 1)
    kept, learnt = (model.decoder.layers[2].mlp.up.weight for model in (fathomlm.load(teacher), trained))
    assert 0 < (kept - learnt).abs().max() < 0.1, "it went on from the layers that were kept"


def test_influence_is_measured_over_the_corpus(recipe: Make, teacher: Path, token_corpus: Path) -> None:
    corpus = Corpus.open(token_corpus)
    made = of(recipe, teacher, drop=2, by="influence", calibrate=1024)
    student = build_student(made, corpus)
    assert student.architecture.layers == read_student(made).architecture.layers == 2
    rows = torch.from_numpy(corpus.stream("train").read(0, 1024)).view(-1, 64)
    found = fathomlm.measure_activations(str(teacher), rows, moments=False)
    expected = fathomlm.convert(str(teacher), drop=2, activations=found)
    assert torch.equal(student.decoder.layers[1].mlp.up.weight, expected.decoder.layers[1].mlp.up.weight)


def test_a_greedy_search_reads_the_corpus(recipe: Make, teacher: Path, token_corpus: Path) -> None:
    corpus = Corpus.open(token_corpus)
    made = of(recipe, teacher, drop=2, by="greedy", calibrate=1024)
    told: list[tuple[int, int]] = []
    student = build_student(made, corpus, on_layer=lambda done, total: told.append((done, total)))
    rows = torch.from_numpy(corpus.stream("train").read(0, 1024)).view(-1, 64)
    found = fathomlm.measure_activations(str(teacher), rows, moments=False, greedy=2)
    assert student.config.kept_layers == [layer for layer in range(4) if layer not in found.order]
    assert told[-1] == (4 + 4 + 3, 4 + 4 + 3)
    assert read_student(made).architecture.layers == 2


def test_a_narrower_source_trains_and_the_dry_run_knows_its_shape(recipe: Make, teacher: Path) -> None:
    made = of(recipe, teacher, drop=1, by="last", neurons=8, calibrate=1024)
    spec = read_student(made)
    assert (spec.architecture.layers, spec.architecture.intermediate) == (3, 8)
    train(made)
    trained = fathomlm.load(Path(made.directory) / "last")
    assert trained.architecture == spec.architecture


def test_repeated_layers_train_and_heal_and_the_dry_run_knows_their_shape(recipe: Make, teacher: Path) -> None:
    made = of(recipe, teacher, drop=0, repeat=2)
    made = dataclasses.replace(
        made, loss=LossRecipe(distill=DistillRecipe(source=str(teacher)), heal=HealRecipe()), budget=BudgetRecipe(steps=2)
    )
    spec = read_student(made)
    assert (spec.plan.layout, spec.plan.unrolled_layers) == ("2+1+1", 5)
    train(made)
    trained = fathomlm.load(Path(made.directory) / "last")
    assert (trained.plan, trained.architecture) == (spec.plan, spec.architecture)
    assert trained.config.kept_layers == [0, 1, 2, 2, 3]


def test_every_visit_is_healed_towards_the_layer_that_it_repeats() -> None:
    plan, teacher_plan = repeated_plan(4, 2), DepthPlan.vanilla(8)
    assert teacher_steps(plan, teacher_plan, [0, 2, 5, 5, 7]) == (1, 4, 6, 6, 7)


def test_long_measurements_run_on_the_device_of_the_run(
    recipe: Make, teacher: Path, token_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fathomlm.train import setup

    places: list[Any] = []
    inner = setup.measure_activations

    def watch(*given: Any, **options: Any) -> Any:
        places.append(options["device"])
        return inner(*given, **options | {"device": "cpu"})

    monkeypatch.setattr(setup, "measure_activations", watch)
    for model in ({"by": "influence"}, {"by": "greedy"}, {"by": "last", "neurons": 8}):
        build_student(of(recipe, teacher, drop=1, calibrate=1024, **model), Corpus.open(token_corpus), "cuda:3")
    assert places == ["cpu", "cuda:3", "cuda:3"]


class Stopped(SilentWatcher):
    """After three steps, as by a scheduler."""

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("heals", [False, True])
def test_a_run_that_goes_on_has_the_layers_that_it_began_with(
    recipe: Make, teacher: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    """Another machine may measure another order."""
    from fathomlm.train import setup

    made = of(recipe, teacher, drop=1, by="influence", calibrate=1024)
    made = dataclasses.replace(made, budget=BudgetRecipe(steps=6))
    if heals:
        loss = LossRecipe(distill=DistillRecipe(source=str(teacher)), heal=HealRecipe(weight=1.0))
        made = dataclasses.replace(made, loss=loss)
    inner, gone = setup.measure_activations, [0]

    def measure(*given: Any, **options: Any) -> Any:
        influence = tuple(0.1 if layer in gone else 0.5 for layer in range(4))
        return dataclasses.replace(inner(*given, **options), influence=influence)

    monkeypatch.setattr(setup, "measure_activations", measure)
    assert not train(made, watcher=Stopped()).finished
    gone[:] = [2]
    if heals:
        with pytest.raises(TrainingError, match=r"has layers 1, 2, 3 of .*; measured here, others would be kept"):
            train(made, resume=True)
        return
    assert train(made, resume=True).finished
    assert fathomlm.load(Path(made.directory) / "last").config.kept_layers == [1, 2, 3]


def test_a_long_measurement_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    watcher = SilentWatcher()
    monkeypatch.setattr(watcher, "note", notes.append)
    tell = measuring(watcher)
    tell(1, 9)
    monkeypatch.setattr("fathomlm.checkpoints.heartbeat.EVERY", 0.0)
    tell(2, 9)
    assert notes == ["measuring layers: 2 of 9"]


def test_tied_and_relaxed_by_activations(recipe: Make, teacher: Path, token_corpus: Path) -> None:
    made = of(recipe, teacher, recursions=2, sharing="cycle", relax="lora", rank=4, relax_init="aware", calibrate="1k")
    student = build_student(made, Corpus.open(token_corpus))
    plain = build_student(
        of(recipe, teacher, recursions=2, sharing="cycle", relax="lora", rank=4), Corpus.open(token_corpus)
    )
    name = "deltas.3.linears.down.b"
    assert not torch.equal(student.decoder.get_parameter(name), plain.decoder.get_parameter(name))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"by": "last"}, r"model\.by requires model\.drop"),
        ({"drop": 1, "by": "influence"}, r"model\.by: influence requires model\.calibrate"),
        ({"drop": 1, "by": "greedy"}, r"model\.by: greedy requires model\.calibrate"),
        ({"drop": 1, "by": "lst"}, "did you mean 'last'"),
        ({"neurons": 8, "calibrate": 1024}, r"model\.neurons requires model\.drop"),
        ({"drop": 0, "neurons": 8}, r"model\.neurons: 8 requires model\.calibrate"),
        ({"drop": 0, "neurons": 8, "recursions": 2, "calibrate": 1024}, r"model\.neurons cannot be combined"),
        ({"drop": 0, "neurons": 80000, "calibrate": 1024}, "neurons must be between 1 and the model's"),
        ({"repeat": 2}, r"model\.repeat requires model\.drop"),
        ({"drop": 0, "repeat": 2, "recursions": 2}, r"cannot be combined with model\.recursions"),
        ({"drop": 0, "repeat": 2, "relax": "lora"}, r"cannot be combined with model\.relax"),
        ({"calibrate": 1024}, r"model\.calibrate requires model\.drop"),
        ({"recursions": 2, "init": "aligned"}, r"model\.init: aligned requires model\.calibrate"),
        ({"recursions": 2, "relax_init": "zero", "calibrate": 1024}, "relax-init requires a lora or dora relaxation"),
        ({"recursions": 2, "init": "lower", "norm_init": "zero", "calibrate": 1024}, "norm-init requires the init average"),
        ({"drop": 4}, "drop must be between 0 and 3"),
    ],
)
def test_refusals_come_with_the_dry_run(recipe: Make, teacher: Path, model: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        read_student(of(recipe, teacher, **model))


@pytest.mark.parametrize(
    ("source", "model", "says"),
    [
        ("olmo2-1b", {"drop": 0, "repeat": 2}, "without norms behind them"),
        ("qwen3-30b-a3b", {"drop": 0, "neurons": 8, "calibrate": 1024}, "this model has experts"),
        ("t5-small", {"drop": 1, "calibrate": 1024}, r"model\.calibrate requires a decoder-only model"),
        ("smollm2-135m", {"drop": 0, "repeat": 100}, "must be <= 1024, got 2703"),
    ],
)
def test_models_that_cannot_be_made_smaller_so_are_refused_before_data_are_read(
    recipe: Make, source: str, model: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        read_student(of(recipe, Path(source), **model), foresee=True)


def test_too_little_to_calibrate_on(recipe: Make, teacher: Path, token_corpus: Path) -> None:
    with pytest.raises(OptionError, match=r"model\.calibrate must be >= 64"):
        build_student(of(recipe, teacher, drop=1, calibrate=10), Corpus.open(token_corpus))
