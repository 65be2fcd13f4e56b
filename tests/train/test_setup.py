"""From a recipe to a student: its exits, its heads, and what its context can hold."""

from __future__ import annotations

import pytest
import torch

from fathomlm.checkpoints.assemble import replan
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.reading import build_recipe
from fathomlm.train.student import check_rows, read_student

SHAPE = Architecture(
    family="llama", layers=6, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=40, context=64
)


@pytest.fixture
def student():
    model = FathomForCausalLM(FathomConfig.of(SHAPE, DepthPlan.build("cycle", 3, 6), dtype=torch.float32))
    model.decoder.reset_parameters()
    return model


def test_exits_are_put_on_and_taken_off_without_a_change_of_weights(student):
    before = {name: value.clone() for name, value in student.decoder.state_dict().items()}
    exited = replan(student, student.plan.with_exits((1, 3)), exit_rank=4)
    assert (exited.plan.exits, len(exited.decoder.exit_heads)) == ((1, 3), 2)
    plain = replan(exited, exited.plan.with_exits(()), exit_rank=0)
    assert (plain.plan.exits, plain.config.exit_rank) == ((), 0)
    after = plain.decoder.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_trained_heads_stay_where_exit_and_rank_stay(student):
    first = replan(student, student.plan.with_exits((1,)), exit_rank=4)
    with torch.no_grad():
        first.decoder.exit_delta(1).b.fill_(7.0)
    more = replan(first, first.plan.with_exits((1, 3)), exit_rank=4)
    assert bool((more.decoder.exit_delta(1).b == 7.0).all())
    assert not more.decoder.exit_delta(3).b.any()
    wider = replan(first, first.plan.with_exits((1,)), exit_rank=8)
    assert not wider.decoder.exit_delta(1).b.any()


def test_rows_longer_than_the_models_context_are_refused():
    values = {"model": {"source": "x"}, "budget": {"steps": 1}, "batch": {"sequences": 1}}
    check_rows(build_recipe({**values, "data": {"context": 64}}), SHAPE)
    with pytest.raises(OptionError, match="rows of 65 tokens, but the model's context is 64"):
        check_rows(build_recipe({**values, "data": {"context": 65}}), SHAPE)
    pairs = {"pairs": ["a", "b"], "source_length": 60, "target_length": 10}
    with pytest.raises(OptionError, match=r"source_length and data\.target_length make rows of 70"):
        check_rows(build_recipe({**values, "data": pairs}), SHAPE)


def test_fields_that_tie_are_refused_where_nothing_is_tied():
    """By the dry run as by the run: both ask here."""
    length = {"budget": {"steps": 1}, "batch": {"sequences": 1}}
    recipe = build_recipe({"model": {"source": "smollm2-135m", "sharing": "cycle"}, **length})
    with pytest.raises(OptionError, match=r"model\.sharing says how smollm2-135m is tied"):
        read_student(recipe)
