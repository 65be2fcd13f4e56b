"""What holds for every depth plan and its cost, whatever the strategy, the recursions and the layers."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count, relaxation_parameters
from fathomlm.depth.sharing import STRATEGIES, spread
from fathomlm.errors import PlanError

quick = settings(deadline=None, max_examples=100)
sharings = st.sampled_from(sorted(STRATEGIES))
recursion_counts = st.integers(1, 9)
base_sizes = st.integers(1, 48)


@st.composite
def plans(draw, sharing=sharings):
    sharing = draw(sharing)
    recursions = draw(recursion_counts)
    ends = 2 * STRATEGIES[sharing].kept_apart
    base = draw(st.integers(recursions + ends, 48 + ends))
    return DepthPlan.build(sharing, recursions, base, draw(st.sampled_from(["add", "drop"])))


@st.composite
def architectures(draw, layers):
    kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    return Architecture(
        family="llama",
        layers=layers,
        hidden=draw(st.integers(1, 40)),
        intermediate=draw(st.integers(1, 40)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=11,
        gated=draw(st.booleans()),
    )


@quick
@given(sharings, recursion_counts, base_sizes, st.sampled_from([None, "add", "drop"]))
def test_build_gives_a_plan_of_the_right_depth_or_says_why_not(sharing, recursions, base, resize):
    core = base - 2 * STRATEGIES[sharing].kept_apart
    if core < 1 or (resize is None and core % recursions) or (resize == "drop" and core < recursions):
        with pytest.raises(PlanError):
            DepthPlan.build(sharing, recursions, base, resize)
        return
    plan = DepthPlan.build(sharing, recursions, base, resize)
    change = plan.unrolled_layers - base
    assert {None: change == 0, "add": 0 <= change < recursions, "drop": -recursions < change <= 0}[resize]
    assert plan.core_layers * recursions == plan.unrolled_layers - 2 * STRATEGIES[sharing].kept_apart


@quick
@given(sharings, recursion_counts, base_sizes)
def test_the_counts_named_by_the_error_are_those_that_divide(sharing, recursions, base):
    core = base - 2 * STRATEGIES[sharing].kept_apart
    assume(core >= 1 and core % recursions)
    with pytest.raises(PlanError) as caught:
        DepthPlan.build(sharing, recursions, base)
    named = [int(n) for n in str(caught.value).split("these do: ")[1].split(". ")[0].split(", ")]
    for n in named:
        assert DepthPlan.build(sharing, n, base).unrolled_layers == base
    assert named == [n for n in range(1, core + 1) if core % n == 0]


@quick
@given(plans())
def test_every_core_layer_runs_once_in_each_recursion_and_the_ends_once(plan):
    assert [step.index for step in plan] == list(range(plan.unrolled_layers))
    uses = Counter((step.layer, step.recursion) for step in plan)
    assert set(uses.values()) == {1}
    for layer in range(plan.unique_layers):
        steps = plan.uses(layer)
        expected = plan.recursions if steps[0].part == "core" else 1
        assert [step.recursion for step in steps] == list(range(expected))
        assert all(plan.is_shared(step) == (len(steps) > 1) for step in steps)


@quick
@given(plans())
def test_layers_are_numbered_in_the_order_they_first_run(plan):
    first_uses = [step.layer for step in plan if step.recursion == 0]
    assert first_uses == list(range(plan.unique_layers))


@quick
@given(plans())
def test_the_layout_adds_up_to_the_unique_layers(plan):
    assert sum(int(part) for part in plan.layout.split("+")) == plan.unique_layers


@quick
@given(plans(sharing=st.sampled_from(["cycle", "middle-cycle", "cycle-rev"])))
def test_a_whole_pass_ends_once_in_each_recursion(plan):
    assert plan.whole_passes
    core = [step for step in plan if step.part == "core"]
    assert [step.recursion for step in core] == sorted(step.recursion for step in core)
    ends = [step for step in core if plan.is_last_of_recursion(step)]
    assert [step.recursion for step in ends] == list(range(plan.recursions))
    if plan.loops:
        assert len({step.layer for step in ends}) == 1


@quick
@given(plans())
def test_origins_climb_from_the_first_base_layer_to_the_last(plan):
    origins = [step.origin for step in plan]
    assert origins == sorted(origins)
    assert all(0 <= origin < plan.base_layers for origin in origins)
    if plan.unrolled_layers == plan.base_layers:
        assert origins == list(range(plan.base_layers))
    elif plan.unrolled_layers > 1:
        assert (origins[0], origins[-1]) == (0, plan.base_layers - 1)


@quick
@given(plans())
def test_a_plan_survives_json(plan):
    assert DepthPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@quick
@given(sharings, st.integers(3, 48))
def test_one_recursion_is_the_base_model(sharing, layers):
    plan = DepthPlan.build(sharing, 1, layers)
    assert [step.layer for step in plan] == [step.layer for step in DepthPlan.vanilla(layers)]
    assert not any(plan.is_shared(step) for step in plan)


@quick
@given(st.integers(0, 5), st.integers(1, 60), st.integers(2, 60))
def test_spread_keeps_both_ends_and_even_gaps(first, length, number):
    layers = spread(first, first + length, number)
    assert (layers[0], layers[-1], len(layers)) == (first, first + length, number)
    for i, layer in enumerate(layers):
        assert abs(layer - (first + Fraction(i * length, number - 1))) <= Fraction(1, 2)


@quick
@given(plans(), st.data())
def test_sharing_layers_changes_parameters_but_not_flops(plan, data):
    architecture = data.draw(architectures(plan.base_layers))
    counted = count(architecture, plan, context=64)
    base = count(architecture, DepthPlan.vanilla(plan.base_layers), context=64)
    assert counted.relative_flops == pytest.approx(plan.unrolled_layers / plan.base_layers)
    assert counted.relative_kv == pytest.approx(plan.unrolled_layers / plan.base_layers)
    per_layer = base.non_embedding_parameters - counted.non_embedding_parameters
    assert per_layer == (plan.base_layers - plan.unique_layers) * architecture.layer_parameters
    assert base.relative_flops == base.relative_kv == 1.0
    assert base.relative_max_batch == counted.relative_max_batch == 32


@quick
@given(plans(sharing=st.sampled_from(["cycle", "middle-cycle"])), st.sampled_from(["expert", "token"]), st.data())
def test_a_router_never_costs_more_than_full_depth_and_sharing_never_stores_more(plan, router, data):
    architecture = data.draw(architectures(plan.base_layers))
    full = count(architecture, plan, context=64)
    cached = count(architecture, plan, router=router, context=64)
    shared = count(architecture, plan, router=router, kv="share", context=64)
    if plan.recursions == 1:
        assert cached.forward_flops_per_token == shared.forward_flops_per_token == full.forward_flops_per_token
        assert cached.kv_bytes_per_token == shared.kv_bytes_per_token == full.kv_bytes_per_token
    else:
        assert cached.forward_flops_per_token < full.forward_flops_per_token
        assert shared.forward_flops_per_token < full.forward_flops_per_token
        assert shared.kv_bytes_per_token < cached.kv_bytes_per_token < full.kv_bytes_per_token
    n = plan.recursions
    assert cached.relative_max_batch == 32 * 2 * n // (n + 1)


@quick
@given(plans(), st.integers(1, 64), st.sampled_from(["lora", "dora"]), st.data())
def test_low_rank_grows_with_the_rank_until_the_matrices_cap_it(plan, rank, kind, data):
    architecture = data.draw(architectures(plan.base_layers))
    names = [linear.name for linear in architecture.linears()]

    def added(size: int) -> int:
        return relaxation_parameters(architecture, plan, Relaxation(kind=kind, ranks=dict.fromkeys(names, size)))

    assert added(rank) <= added(rank + 1)
    assert added(10_000) == added(20_000)
    assert (added(rank) == 0) == (plan.recursions == 1)
