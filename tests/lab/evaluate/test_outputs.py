"""Which outputs a model has, by name."""

from __future__ import annotations

import pytest

from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, PlanError
from fathomlm.lab.evaluate.outputs import FULL, choose_outputs, exit_outputs
from lab.evaluate.evaluate_models import PLANS


def names(plan: str, exits: str | None = None, max_depth: str | int | None = None) -> list[str]:
    return [output.name for output in choose_outputs(PLANS[plan][0], exits, max_depth)]


def test_exits_by_name() -> None:
    assert names("looped") == ["full"]
    assert names("looped", "recursion") == ["layer 2 (recursion 1)", "layer 4 (recursion 2)", "full"]
    assert names("middle", "recursion") == ["layer 3 (recursion 1)", "full"]
    assert names("looped", "layer") == ["layer 1", "layer 2", "layer 3", "layer 4", "layer 5", "full"]
    assert names("middle", "all") == ["layer 1", "layer 2", "layer 3 (recursion 1)", "layer 4", "layer 5", "full"]
    assert names("plain", "all") == names("plain", "layer")
    assert names("plain", "5, 2,5") == ["layer 2", "layer 5", "full"]


def test_maximum_depths_by_number() -> None:
    assert names("looped", None, "all") == ["max. depth 1", "max. depth 2", "max. depth 3"]
    assert names("expert", None, "2") == ["max. depth 2"]
    assert names("expert", None, 1) == ["max. depth 1"]


def test_generation_is_told_the_same() -> None:
    exit_, end = exit_outputs(PLANS["plain"][0], "3")
    assert exit_.exiting is not None
    assert exit_.exiting.exits(PLANS["plain"][0]) == (2,)
    assert (end, end.exiting, end.control) == (FULL, None, None)
    (depth,) = choose_outputs(PLANS["looped"][0], None, "2")
    assert depth.control is not None
    assert (depth.control.max_depth, depth.exiting) == (2, None)
    assert depth.record() == {"output": "max. depth 2", "layer": None, "recursion": None, "max_depth": 2}


@pytest.mark.parametrize(
    ("plan", "exits", "max_depth", "message"),
    [
        ("looped", "layer", "1", "cannot be combined"),
        ("looped", "recursoin", None, "unknown exit 'recursoin' .did you mean 'recursion'"),
        ("looped", "6", None, "must be between 1 and 5 for this model's 6 layers, got 6"),
        ("looped", "0", None, "must be between 1 and 5"),
        ("looped", "", None, "unknown exit ''"),
        ("plain", "recursion", None, "requires a looped model"),
        ("expert", "layer", None, "its router already chooses each token's depth; --max-depth limits it"),
        ("plain", None, "all", "requires a looped model"),
        ("looped", None, "4", "from 1 to the model's 3 recursions, got 4"),
        ("looped", None, "0", "from 1 to the model's 3"),
        ("looped", None, "deep", "a number of recursions, or all; got 'deep'"),
    ],
)
def test_what_a_model_does_not_have_is_refused(plan: str, exits: str | None, max_depth: str | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        choose_outputs(PLANS[plan][0], exits, max_depth)


def test_recursions_without_an_output_have_layers_only() -> None:
    plan = DepthPlan.build("sequence", 2, 4)
    with pytest.raises(PlanError, match="recursions have no outputs under sequence"):
        exit_outputs(plan, "recursion")
    assert [output.layer for output in exit_outputs(plan, "all")] == [1, 2, 3, None]
