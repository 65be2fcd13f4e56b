"""Routing as plain data: defaults, refusals, how many tokens go on, and how plans carry it with shared keys and values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fathomlm.depth import DepthPlan, Routing, build_routing
from fathomlm.depth.cost import count
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import OptionError, PlanError

LOOP = DepthPlan.build("middle-cycle", 3, 8)
EXPERT = build_routing("expert", 3)
TOKEN = build_routing("token", 3)


def test_defaults_are_those_of_the_thesis() -> None:
    assert (EXPERT.score, EXPERT.network, EXPERT.alpha, EXPERT.sampling) == ("sigmoid", "linear", 0.1, "aux_loss")
    assert (EXPERT.update, EXPERT.random, EXPERT.recursions) == ("add", False, 3)
    assert EXPERT.capacity == (1.0, 2 / 3, 1 / 3)
    assert (TOKEN.score, TOKEN.network, TOKEN.alpha, TOKEN.balancing) == ("softmax", "linear", 1.0, "loss")
    assert TOKEN.weighting == "every"


@pytest.mark.parametrize("recursions", [2, 3, 4, 5])
def test_each_recursion_keeps_its_part_of_the_whole_length(recursions: int) -> None:
    routing = build_routing("expert", recursions)
    for tokens in range(1, 200):
        for recursion in range(recursions):
            exact = (recursions - recursion) * tokens // recursions
            assert routing.kept(recursion, tokens) == max(1, exact)
            assert routing.kept(recursion, tokens, openness=1.0) == tokens
            assert routing.kept(recursion, tokens) <= routing.kept(recursion, tokens, 0.5) <= tokens
        kept = [routing.kept(recursion, tokens, 0.3) for recursion in range(recursions)]
        assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(
    ("kind", "options", "weights"),
    [
        ("expert", {}, 3 * 10),
        ("expert", {"sampling": "aux_router"}, 2 * 3 * 10),
        ("expert", {"network": "mlp"}, 3 * (100 + 10)),
        ("expert", {"network": "wide"}, 3 * (400 + 40)),
        ("token", {}, 30),
        ("token", {"network": "mlp"}, 100 + 30),
        ("token", {"balancing": "loss_free"}, 30 + 3),
    ],
)
def test_parameters_by_hand(kind: str, options: dict[str, str], weights: int) -> None:
    assert build_routing(kind, 3, **options).parameters(10) == weights  # type: ignore[arg-type]


ROUTINGS = [
    EXPERT,
    TOKEN,
    build_routing("expert", 3, score="tanh", network="wide", alpha=0.25, capacity=[1, 0.5, 0.5], sampling="aux_router"),
    build_routing("expert", 3, update="interpolate", random=True),
    build_routing("token", 3, score="sigmoid", network="mlp", balancing="loss_free", weighting="last"),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=range(len(ROUTINGS)))
def test_routing_survives_json(routing: Routing) -> None:
    assert Routing.from_dict(json.loads(json.dumps(routing.to_dict()))) == routing


@pytest.mark.parametrize("kv", ["cache", "share", "hybrid"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=range(len(ROUTINGS)))
def test_a_routed_plan_survives_json(routing: Routing, kv: str) -> None:
    plan = LOOP.with_routing(routing).with_kv(kv)  # type: ignore[arg-type]
    restored = DepthPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert restored == plan
    assert (restored.routing, restored.kv) == (routing, kv)
    assert hash(restored) == hash(plan)


@pytest.mark.parametrize(
    "plan",
    [
        DepthPlan.vanilla(8).with_kv("share", "cycle", 2),
        DepthPlan.vanilla(8).with_kv("share", "middle-sequence", 3),
        LOOP.with_kv("share"),
        LOOP.with_exits([2, 4]).with_kv("share"),
        DepthPlan.build("middle-cycle", 3, 9, "add").with_routing(EXPERT).with_kv("hybrid"),
    ],
    ids=["plain", "plain, middle", "looped", "exits", "resized"],
)
def test_a_plan_that_shares_survives_json(plan: DepthPlan) -> None:
    assert DepthPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_plans_without_routing_are_written_as_before() -> None:
    assert LOOP.to_dict() == {"sharing": "middle-cycle", "recursions": 3, "base_layers": 8, "unrolled_layers": 8}
    assert LOOP.with_routing(EXPERT).with_routing(None) == LOOP
    assert LOOP.with_kv("share").with_kv("cache") == LOOP


# --- what cannot be ------------------------------------------------------------------------------------------------

BAD_BUILDS: list[tuple[str, int, dict[str, Any], str]] = [
    ("experts", 3, {}, r"unknown router 'experts' \(did you mean 'expert'\?\); known: expert, token"),
    ("expert", 1, {}, "a router requires recursions >= 2, got 1"),
    ("expert", 3, {"capacity": [1, 0.5]}, "got 2 for 3 recursions"),
    ("expert", 3, {"capacity": [1, 0.5, 0.6]}, "capacities must fall from at most 1 and stay above 0, got 1, 0.5, 0.6"),
    ("expert", 3, {"capacity": [1.5, 1, 1]}, "capacities must fall from at most 1"),
    ("expert", 3, {"capacity": [1, 1, 0]}, "capacities must fall from at most 1"),
    ("expert", 3, {"capacity": [float("nan"), 1, 1]}, "capacities must fall from at most 1"),
    ("expert", 3, {"score": "softmax"}, "unknown score 'softmax'; known: identity, sigmoid, tanh"),
    ("token", 3, {"score": "tanh"}, "unknown score 'tanh'; known: sigmoid, softmax"),
    ("expert", 3, {"network": "deep"}, "invalid network 'deep'; choose from linear, mlp, wide"),
    ("expert", 3, {"sampling": "aux"}, "invalid sampling 'aux'"),
    ("token", 3, {"balancing": "lossfree"}, r"invalid balancing 'lossfree' \(did you mean 'loss_free'\?\)"),
    ("token", 3, {"weighting": "first"}, "invalid weighting 'first'"),
    ("expert", 3, {"update": "replace"}, "invalid update 'replace'"),
    ("expert", 3, {"alpha": 0.0}, "alpha must be > 0, got 0.0"),
    ("expert", 3, {"alpha": float("nan")}, "alpha must be a number > 0, got nan"),
    ("expert", 3, {"alpha": float("inf")}, "alpha must be a number > 0, got inf"),
    ("token", 3, {"score": "identity"}, "unknown score 'identity'; known: sigmoid, softmax"),
    (
        "token",
        3,
        {"capacity": [1, 1, 1]},
        "capacity cannot be combined with token-choice routing",
    ),
    (
        "token",
        3,
        {"sampling": "aux_loss"},
        "sampling cannot be combined with token-choice routing",
    ),
    ("token", 3, {"update": "add"}, "update cannot be combined with token-choice routing"),
    (
        "expert",
        3,
        {"balancing": "loss"},
        "balancing cannot be combined with expert-choice routing",
    ),
    (
        "expert",
        3,
        {"weighting": "every"},
        "weighting cannot be combined with expert-choice routing",
    ),
]


@pytest.mark.parametrize(("kind", "recursions", "options", "message"), BAD_BUILDS)
def test_routing_that_cannot_be(kind: str, recursions: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_routing(kind, recursions, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, r"the routing: unknown field 'depth'"),
        ({"kind": None}, "the routing is missing kind"),
        ({"capacity": None}, "the routing is missing capacity"),
        ({"capacity": 3}, "capacity must be a list"),
        ({"kind": "experts"}, "unknown router 'experts'"),
    ],
)
def test_records_that_are_no_routing(change: dict[str, Any], message: str) -> None:
    """A None here stands for a field that is missing."""
    record = {name: value for name, value in (EXPERT.to_dict() | change).items() if value is not None}
    with pytest.raises(OptionError, match=message):
        Routing.from_dict(record)


BAD_PLANS: list[tuple[Any, str]] = [
    (lambda: LOOP.with_kv("chache"), r"unknown kv mode 'chache' \(did you mean 'cache'\?\)"),
    (lambda: DepthPlan.vanilla(8).with_kv("share"), "KV sharing on a plain model requires a strategy, such as cycle"),
    (lambda: DepthPlan.vanilla(8).with_kv("share", "cycle", 1), "KV sharing on a plain model requires a strategy"),
    (lambda: DepthPlan.vanilla(8).with_kv("share", None, 2), "KV sharing on a plain model requires a strategy"),
    (lambda: DepthPlan.vanilla(8).with_kv("cache", "cycle", 2), "a kv sharing strategy requires kv mode 'share' on a plain"),
    (lambda: LOOP.with_kv("share", "cycle", 2), "a kv sharing strategy requires kv mode 'share' on a plain model; looped"),
    (lambda: LOOP.with_kv("share", None, 2), "a kv sharing strategy requires kv mode 'share' on a plain model"),
    (lambda: DepthPlan.vanilla(8).with_kv("share", "loop", 2), "unknown kv sharing strategy 'loop'"),
    (lambda: DepthPlan.vanilla(8).with_kv("share", "cycle", 3), "3 kv loops do not divide 8 layers; these do: 2, 4, 8"),
    (
        lambda: DepthPlan.vanilla(8).with_kv("share", "middle-cycle", 4),
        "4 kv loops do not divide 6 layers; these do: 2, 3, 6",
    ),
    (lambda: LOOP.with_kv("hybrid"), "kv mode 'hybrid' requires a router"),
    (lambda: DepthPlan.vanilla(8).with_kv("hybrid"), "kv mode 'hybrid' requires a router"),
    (lambda: LOOP.with_routing(EXPERT).with_kv("hybrid").with_routing(None), "kv mode 'hybrid' requires a router"),
    (
        lambda: DepthPlan.build("sequence", 2, 8).with_routing(build_routing("expert", 2)),
        r"a router requires a looped core \(cycle or middle-cycle\), not sequence",
    ),
    (lambda: DepthPlan.build("cycle-rev", 2, 8).with_routing(build_routing("token", 2)), "not cycle-rev"),
    (lambda: LOOP.with_routing(build_routing("expert", 2)), "the routing is for 2 recursions, the plan has 3"),
    (lambda: DepthPlan.vanilla(8).with_routing(EXPERT), "the routing is for 3 recursions, the plan has 1"),
    (lambda: LOOP.with_exits([2]).with_routing(EXPERT), "early exits cannot be combined with a router"),
    (lambda: LOOP.with_routing(EXPERT).with_exits([2]), "early exits cannot be combined with a router"),
    *(
        (
            lambda kv=kv: LOOP.with_routing(build_routing("expert", 3, capacity=[0.9, 0.5, 0.1])).with_kv(kv),
            f"kv mode '{kv}' reads the first recursion's entries, so its capacity must be 1",
        )
        for kv in ("share", "hybrid")
    ),
    (lambda: DepthPlan.from_dict(LOOP.to_dict() | {"router": {}}), "the plan: unknown field 'router'"),
    (lambda: DepthPlan.from_dict(LOOP.to_dict() | {"kv": "hybrid"}), "kv mode 'hybrid' requires a router"),
]


@pytest.mark.parametrize(("make", "message"), BAD_PLANS, ids=[message[:40] for _, message in BAD_PLANS])
def test_plans_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_selective_first_recursion_goes_with_recursion_wise_caching() -> None:
    plan = LOOP.with_routing(build_routing("expert", 3, capacity=[0.9, 0.5, 0.1]))
    assert plan.routing is not None
    assert plan.routing.capacity == (0.9, 0.5, 0.1)


# --- whose keys and values -----------------------------------------------------------------------------------------

SOURCES: list[tuple[DepthPlan, list[int]]] = [
    (DepthPlan.vanilla(8), [0, 1, 2, 3, 4, 5, 6, 7]),
    (DepthPlan.vanilla(8).with_kv("share", "cycle", 2), [0, 1, 2, 3, 0, 1, 2, 3]),
    (DepthPlan.vanilla(8).with_kv("share", "cycle", 4), [0, 1, 0, 1, 0, 1, 0, 1]),
    (DepthPlan.vanilla(8).with_kv("share", "sequence", 2), [0, 0, 2, 2, 4, 4, 6, 6]),
    (DepthPlan.vanilla(8).with_kv("share", "cycle-rev", 2), [0, 1, 2, 3, 3, 2, 1, 0]),
    (DepthPlan.vanilla(8).with_kv("share", "middle-cycle", 2), [0, 1, 2, 3, 1, 2, 3, 7]),
    (DepthPlan.vanilla(8).with_kv("share", "middle-sequence", 3), [0, 1, 1, 1, 4, 4, 4, 7]),
    (DepthPlan.build("cycle", 2, 8).with_kv("share"), [0, 1, 2, 3, 0, 1, 2, 3]),
    (DepthPlan.build("sequence", 2, 8).with_kv("share"), [0, 0, 2, 2, 4, 4, 6, 6]),
    (DepthPlan.build("cycle-rev", 2, 8).with_kv("share"), [0, 1, 2, 3, 3, 2, 1, 0]),
    (LOOP.with_kv("share"), [0, 1, 2, 1, 2, 1, 2, 7]),
    (LOOP, [0, 1, 2, 3, 4, 5, 6, 7]),
    (LOOP.with_routing(TOKEN).with_kv("hybrid"), [0, 1, 2, 1, 2, 1, 2, 7]),
]


@pytest.mark.parametrize(
    ("plan", "sources"), SOURCES, ids=[f"{p.sharing}{p.recursions}-{p.kv}-{p.kv_sharing}" for p, _ in SOURCES]
)
def test_whose_entries_a_step_starts_from(plan: DepthPlan, sources: list[int]) -> None:
    assert list(plan.kv_sources) == sources
    reads = [plan.reads_kv(step) for step in plan]
    assert reads == [plan.kv == "share" and source != i for i, source in enumerate(sources)]
    for i, source in enumerate(sources):
        assert source <= i
        assert sources[source] == source, "a source makes its own"


def test_recursion_steps_are_the_core_without_its_ends() -> None:
    assert [[step.index for step in LOOP.recursion_steps(r)] for r in range(3)] == [[1, 2], [3, 4], [5, 6]]


# --- what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["cache", "share", "hybrid"])
@pytest.mark.parametrize(("recursions", "ratio"), [(2, 0.746), (3, 0.664), (4, 0.661)])
@pytest.mark.parametrize("kind", ["expert", "token"])
def test_a_routed_plan_costs_what_the_router_option_says(kind: str, recursions: int, ratio: float, kv: str) -> None:
    architecture = PRESETS["smollm-360m"].architecture
    plan = DepthPlan.build("middle-cycle", recursions, 32, "add")
    routed = plan.with_routing(build_routing(kind, recursions)).with_kv(kv)  # type: ignore[arg-type]
    counted = count(architecture, routed, tokens=10**9)
    assert counted == count(architecture, plan, router=kind, kv=kv, tokens=10**9)  # type: ignore[arg-type]
    if kv == "cache":
        assert round(counted.relative_flops, 3) == ratio
        assert counted.relative_max_batch == {2: 42, 3: 48, 4: 51}[recursions]


def test_measured_capacities_by_hand() -> None:
    """Width 8, 576 weights in a layer's linears, 64 of them in k and v; at a context of 10, 160 FLOPs of attention."""
    architecture = dataclasses.replace(
        PRESETS["smollm-135m"].architecture, layers=4, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4
    )
    plan = DepthPlan.build("cycle", 2, 4).with_routing(build_routing("expert", 2))
    full = 2 * 576 + 160
    measured = count(architecture, plan, capacity=[1.0, 0.25], context=10)
    assert measured.forward_flops_per_token == 2 * full + 2 * (2 * 576 // 4 + 160 // 16)
    assert measured.kv_bytes_per_token == round(2 * 4 * 2 * (2 + 2 * 0.25))
    shared = count(architecture, plan.with_kv("share"), capacity=[1.0, 0.25], context=10)
    assert shared.forward_flops_per_token == 2 * full + 2 * (2 * (576 - 64) // 4 + 160 // 4)
    assert shared.kv_bytes_per_token == 2 * 4 * 2 * 2
    hybrid = count(architecture, plan.with_kv("hybrid"), capacity=[1.0, 0.25], context=10)
    assert hybrid.forward_flops_per_token == 2 * full + 2 * (2 * 576 // 4 + 160 // 4)
    assert hybrid.kv_bytes_per_token == measured.kv_bytes_per_token
    own = DepthPlan.build("cycle", 2, 4).with_routing(build_routing("expert", 2, capacity=[1.0, 0.25]))
    assert count(architecture, own, context=10) == measured
    with pytest.raises(OptionError, match="got 3 for 2 recursions"):
        count(architecture, plan, capacity=[1, 1, 1])


def test_a_plain_model_that_shares_stores_and_projects_less() -> None:
    architecture = PRESETS["smollm-360m"].architecture
    plain = count(architecture, DepthPlan.vanilla(32))
    shared = count(architecture, DepthPlan.vanilla(32).with_kv("share", "cycle", 2))
    assert shared.relative_kv == 0.5
    saved = 16 * 2 * 2 * architecture.hidden * architecture.kv_width
    assert plain.forward_flops_per_token - shared.forward_flops_per_token == saved
