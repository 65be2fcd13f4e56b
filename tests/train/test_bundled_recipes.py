"""The recipes of the model that comes with FathomLM: small enough to ship, and held against its like."""

from __future__ import annotations

import dataclasses

from fathomlm.checkpoints.assemble import empty_model
from fathomlm.checkpoints.native import quantized_names
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.estimate import estimate
from fathomlm.train.reading import read_recipe
from fathomlm.train.schedule import LearningRate
from fathomlm.train.student import read_student

ROUTED, PLAIN = read_recipe("bundled-mor"), read_recipe("bundled-vanilla")


def empty(recipe: object) -> FathomForCausalLM:
    parts = read_student(recipe)
    return empty_model(FathomConfig.of(parts.architecture, parts.plan, parts.relaxation))


def test_it_fits_into_24_megabytes_as_int8() -> None:
    """A byte a weight, four for each row's scale, four for all that stays float32; the files' headers are some kilobytes."""
    model = empty(ROUTED)
    matrices = quantized_names(model)
    sizes = {name: p.numel() + 4 * p.shape[0] if name in matrices else 4 * p.numel() for name, p in model.named_parameters()}
    assert 23.0e6 < sum(sizes.values()) < 23.9e6
    assert max(sizes.values()) < 12e6


def test_the_plain_model_differs_in_its_plan_only() -> None:
    assert ROUTED.model.architecture == PLAIN.model.architecture
    for field in dataclasses.fields(ROUTED):
        if field.name not in ("name", "model"):
            assert getattr(ROUTED, field.name) == getattr(PLAIN, field.name), field.name
    assert read_student(ROUTED).plan.unrolled_layers == read_student(PLAIN).plan.unrolled_layers == 14
    assert empty(ROUTED).decoder.embed.weight.shape == empty(PLAIN).decoder.embed.weight.shape == (12288, 512)


def test_the_milestone_is_where_the_cool_down_begins() -> None:
    rate = LearningRate.of(ROUTED.schedule, estimate(ROUTED).steps)
    assert ROUTED.checkpoint.milestones == [rate.plateau_end]
