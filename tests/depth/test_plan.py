"""The depth plan: layouts, resizing, parts and recursions, and what cannot be laid out."""

from __future__ import annotations

import json
import re

import pytest

from fathomlm.depth import DepthPlan, Step
from fathomlm.errors import PlanError


def order(plan: DepthPlan) -> list[int]:
    return [step.layer for step in plan]


def test_vanilla_runs_every_layer_once():
    plan = DepthPlan.vanilla(4)
    assert list(plan) == [Step(i, i, 0, "core", i) for i in range(4)]
    assert (plan.layout, plan.unique_layers, plan.unrolled_layers, plan.recursions) == ("4", 4, 4, 1)
    assert not any(plan.is_shared(step) for step in plan)


@pytest.mark.parametrize(
    ("sharing", "layers"),
    [
        ("cycle", [0, 1, 2, 0, 1, 2]),
        ("sequence", [0, 0, 1, 1, 2, 2]),
        ("cycle-rev", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_six_layers_in_two_recursions(sharing, layers):
    plan = DepthPlan.build(sharing, 2, 6)
    assert order(plan) == layers
    assert plan.layout == "3"
    assert all(plan.is_shared(step) for step in plan)


@pytest.mark.parametrize(
    ("sharing", "layers"),
    [("middle-cycle", [0, 1, 2, 1, 2, 3]), ("middle-sequence", [0, 1, 1, 2, 2, 3])],
)
def test_middle_strategies_run_the_first_and_last_layer_once(sharing, layers):
    plan = DepthPlan.build(sharing, 2, 6)
    assert order(plan) == layers
    assert [step.part for step in plan] == ["prelude", "core", "core", "core", "core", "coda"]
    assert (plan.layout, plan.unique_layers, plan.core_layers) == ("1+2+1", 4, 2)
    assert [plan.is_shared(step) for step in plan] == [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("sharing", "recursions"),
    [
        ("cycle", [0, 0, 0, 1, 1, 1]),
        ("sequence", [0, 1, 0, 1, 0, 1]),
        ("cycle-rev", [0, 0, 0, 1, 1, 1]),
        ("middle-cycle", [0, 0, 0, 1, 1, 0]),
    ],
)
def test_recursion_counts_the_uses_of_a_layer(sharing, recursions):
    assert [step.recursion for step in DepthPlan.build(sharing, 2, 6)] == recursions


def test_a_recursion_ends_where_the_block_ends():
    plan = DepthPlan.build("middle-cycle", 3, 8)
    assert [step.index for step in plan if plan.is_last_of_recursion(step)] == [2, 4, 6]


def test_uses_gives_the_steps_of_a_layer_in_order():
    plan = DepthPlan.build("cycle-rev", 3, 9)
    assert [step.index for step in plan.uses(0)] == [0, 3, 8]
    assert [step.index for step in plan.uses(2)] == [2, 5, 6]


@pytest.mark.parametrize(
    ("sharing", "loops", "whole_passes"),
    [
        ("cycle", True, True),
        ("middle-cycle", True, True),
        ("cycle-rev", False, True),
        ("sequence", False, False),
        ("middle-sequence", False, False),
    ],
)
def test_which_plans_loop(sharing, loops, whole_passes):
    plan = DepthPlan.build(sharing, 2, 6)
    assert (plan.loops, plan.whole_passes) == (loops, whole_passes)


# Every layout of the thesis (4.4; appendices "Expanded Results of IsoFLOP Analysis" and "of Parameter Sharing
# Strategy"). Its MoR models add layers, its sharing tables drop them.
LAYOUTS = [
    (30, "cycle", 2, None, "15", 30),
    (30, "cycle", 3, None, "10", 30),
    (30, "middle-cycle", 2, None, "1+14+1", 30),
    (30, "middle-cycle", 3, "add", "1+10+1", 32),
    (30, "middle-cycle", 3, "drop", "1+9+1", 29),
    (32, "cycle", 2, None, "16", 32),
    (32, "cycle", 3, "drop", "10", 30),
    (32, "cycle", 3, "add", "11", 33),
    (32, "middle-cycle", 2, None, "1+15+1", 32),
    (32, "middle-cycle", 3, None, "1+10+1", 32),
    (32, "middle-cycle", 4, "add", "1+8+1", 34),
    (26, "middle-cycle", 3, None, "1+8+1", 26),
    (24, "middle-cycle", 3, "add", "1+8+1", 26),
]


@pytest.mark.parametrize(("base", "sharing", "recursions", "resize", "layout", "unrolled"), LAYOUTS)
def test_layouts_of_the_thesis(base, sharing, recursions, resize, layout, unrolled):
    plan = DepthPlan.build(sharing, recursions, base, resize)
    assert (plan.layout, plan.unrolled_layers, plan.base_layers) == (layout, unrolled, base)
    twin = DepthPlan.build(sharing.replace("cycle", "sequence"), recursions, base, resize)
    assert (twin.layout, twin.unrolled_layers) == (layout, unrolled)


def test_resize_changes_nothing_where_the_layers_divide():
    plan = DepthPlan.build("middle-cycle", 3, 32)
    assert plan == DepthPlan.build("middle-cycle", 3, 32, "add") == DepthPlan.build("middle-cycle", 3, 32, "drop")


def test_steps_of_a_resized_plan_stand_in_for_base_layers():
    added = DepthPlan.build("middle-cycle", 3, 30, "add")
    assert added.steps[0].origin == 0
    assert added.steps[1].origin == 1
    assert added.steps[-2].origin == 28
    assert added.steps[-1].origin == 29
    dropped = DepthPlan.build("cycle", 3, 32, "drop")
    assert [dropped.steps[0].origin, dropped.steps[-1].origin] == [0, 31]


def test_a_count_that_does_not_divide_names_those_that_do_and_what_resize_makes():
    with pytest.raises(PlanError) as caught:
        DepthPlan.build("middle-cycle", 4, 32)
    assert str(caught.value) == (
        "4 recursions do not divide 30 layers (32 less the first and last); these do: 1, 2, 3, 5, 6, 10, 15, 30. "
        "--resize (model.resize in a recipe) adds 2 (1+8+1 looped 4 times, 34 layers in all)"
    )
    other = "these do: 1, 2, 4, 8, 16, 32. --resize (model.resize in a recipe) adds 1 (11 looped 3 times"
    with pytest.raises(PlanError, match=re.escape(other)):
        DepthPlan.build("cycle", 3, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cicle", 2, 6), "unknown sharing strategy 'cicle' (did you mean 'cycle'?)"),
        (("cycle", 0, 6), "recursions must be >= 1, got 0"),
        (("cycle", -2, 6), "recursions must be >= 1, got -2"),
        (("cycle", 4, 6, "grow"), "resize must be 'add' or 'drop', got 'grow'"),
        (("middle-cycle", 2, 2), "requires at least 3 layers; got 2"),
        (("cycle", 7, 6, "drop"), "7 recursions leave no layer of 6; at most 6 fit"),
        (("middle-cycle", 7, 8, "drop"), "7 recursions leave no layer of 8; at most 6 fit"),
    ],
)
def test_what_cannot_be_laid_out(arguments, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        DepthPlan.build(*arguments)


@pytest.mark.parametrize(("base", "sharing", "recursions", "resize"), [row[:4] for row in LAYOUTS])
def test_a_plan_survives_json(base, sharing, recursions, resize):
    plan = DepthPlan.build(sharing, recursions, base, resize)
    assert DepthPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loops": 2}, "the plan: unknown field 'loops'"),
        ({"unrolled_layers": 33}, "the plan says 33 unrolled layers, its other fields give 32"),
        ({"sharing": "cycel"}, "did you mean 'cycle'?"),
    ],
)
def test_a_record_that_disagrees_with_itself(change, message):
    record = DepthPlan.build("middle-cycle", 3, 30, "add").to_dict() | change
    with pytest.raises(PlanError, match=re.escape(message)):
        DepthPlan.from_dict(record)


def test_a_record_with_a_field_missing():
    record = DepthPlan.vanilla(4).to_dict()
    del record["recursions"]
    with pytest.raises(PlanError, match="the plan is missing recursions"):
        DepthPlan.from_dict(record)


def injected(recursions: int = 3) -> DepthPlan:
    return DepthPlan.build("middle-cycle", recursions, 3 + 2 * recursions, ends=(2, 1)).with_injection(norm=True)


def test_any_number_of_layers_stands_in_front_of_a_core_and_behind_it():
    plan = injected()
    assert order(plan) == [0, 1, 2, 3, 2, 3, 2, 3, 4]
    assert [step.part for step in plan] == ["prelude"] * 2 + ["core"] * 6 + ["coda"]
    assert [step.origin for step in plan] == list(range(9))
    assert (plan.layout, plan.ends, plan.recursion_ends(), plan.plain) == ("2+2+1", (2, 1), (3, 5), False)
    assert DepthPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert not injected(1).plain


def test_another_number_of_loops_keeps_what_a_plan_is():
    assert injected().with_recursions(5) == injected(5)
    assert injected(5).with_recursions(1) == injected(1)
    gated = DepthPlan.build("cycle", 4, 8).with_loop_norm()
    gated = gated.with_exits(gated.recursion_ends(), gate=True)
    more = gated.with_recursions(6)
    assert (more.unrolled_layers, more.exits, more.exit_gate, more.loop_norm) == (12, (1, 3, 5, 7, 9), True, True)
    assert more.with_recursions(4) == gated


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DepthPlan.build("cycle", 2, 8, ends=(2, 2)), "ends must be >= 1 and require a middle-* strategy"),
        (lambda: DepthPlan.build("middle-cycle", 2, 8, ends=(0, 2)), "ends must be >= 1"),
        (lambda: DepthPlan.build("middle-cycle", 2, 4, ends=(3, 2)), "keeps 3 + 2 layers apart, so it requires at least 6"),
        (lambda: DepthPlan.build("middle-cycle", 2, 8, ends=(2, 1)), "5 layers (8 less the first 2 and last 1)"),
        (lambda: DepthPlan.build("sequence", 2, 8).with_injection(), "injection requires a looped core"),
        (lambda: DepthPlan.build("cycle", 2, 8).with_injection(norm=True), "core_norm requires a coda"),
        (lambda: injected().with_exits([3]), "injection cannot be combined with exits in the plan"),
        (lambda: injected().with_kv("share"), "injection cannot be combined with"),
        (lambda: injected().with_recursions(0), "loops must be >= 1"),
        (lambda: DepthPlan.vanilla(4).with_recursions(2), "requires a looped model"),
        (lambda: DepthPlan.build("cycle", 2, 4).with_exits([0]).with_recursions(3), "cannot be combined with exits"),
        (
            lambda: DepthPlan.from_dict(injected().to_dict() | {"ends": [2]}),
            "the plan: ends must be a list such as [a, b]",
        ),
        (lambda: DepthPlan.from_dict(injected().to_dict() | {"ends": [-2, 5]}), "ends must be >= 1"),
        (lambda: DepthPlan.from_dict(injected().to_dict() | {"injection": 1}), "injection must be true or false"),
    ],
)
def test_what_an_injection_cannot_be_laid_over(make, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make()
