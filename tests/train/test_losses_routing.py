"""What teaches routers, against loops in float64: per-row means, times the row's targets, padding left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fathomlm.depth import Routing, build_routing
from fathomlm.model.route import RoutingTrace
from fathomlm.model.route.trace import Decision
from fathomlm.train.losses.routing import STAIRS, openness, routing_names, routing_parts
from fathomlm.train.recipe import RoutingLossRecipe

B, T = 4, 11
EXPERTS = {
    "falling": build_routing("expert", 3),
    "two recursions": build_routing("expert", 2, capacity=[1.0, 0.3]),
    "none takes all": build_routing("expert", 3, capacity=[0.8, 0.5, 0.2]),
    "aux router": build_routing("expert", 3, sampling="aux_router"),
}
TOKENS = {
    "softmax": build_routing("token", 3),
    "sigmoid": build_routing("token", 3, score="sigmoid"),
    "loss-free": build_routing("token", 2, balancing="loss_free"),
}


def lengths_kept(padding: bool) -> torch.Tensor | None:
    return torch.arange(T)[None] < torch.tensor([T, 4, 1, 7])[:, None] if padding else None


def expert_trace(routing: Routing, seed: int, padding: bool) -> RoutingTrace:
    """Decisions as the top-k walk leaves them: each over the tokens that the one before kept."""
    generator = torch.Generator().manual_seed(seed)
    trace = RoutingTrace(keep_BT=lengths_kept(padding))
    slots = torch.arange(T).expand(B, T)
    asked = torch.ones(B, T, dtype=torch.bool) if trace.keep_BT is None else trace.keep_BT
    depths = torch.zeros(B, T, dtype=torch.long)
    for recursion, part in enumerate(routing.capacity):
        logits = 3 * torch.randn(slots.shape, generator=generator)
        judge = 3 * torch.randn(slots.shape, generator=generator) if routing.sampling == "aux_router" else logits
        at = logits.masked_fill(~asked, -torch.inf).topk(routing.kept(recursion, T)).indices.sort(-1).values
        chosen = torch.zeros_like(asked).scatter(1, at, True) & asked
        trace.decisions.append(Decision(logits, judge, chosen, slots, asked, part < 1))
        slots, asked = slots.gather(1, at), asked.gather(1, at)
        depths = depths.scatter_add(1, slots, asked.long())
    trace.depths_BT = depths
    return trace


def token_trace(routing: Routing, seed: int, padding: bool) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, routing.recursions, generator=generator)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    trace = RoutingTrace(keep_BT=lengths_kept(padding), depth_logits_BTR=logits, depth_scores_BTR=scores)
    depths = 1 + scores.argmax(-1)
    trace.depths_BT = depths if trace.keep_BT is None else depths * trace.keep_BT
    return trace


def numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().numpy()


def brute_expert(trace: RoutingTrace, counted: list[float]) -> dict[str, float]:
    found = dict.fromkeys(("router", "router_z", "mean_depth", "sampling_accuracy"), 0.0)
    depths = numbers(trace.depths_BT)
    keep = np.ones((B, T), bool) if trace.keep_BT is None else trace.keep_BT.numpy()
    for b in range(B):
        right = judged = 0
        for decision in trace.decisions:
            entropy, square, many = 0.0, 0.0, 0
            for n in range(decision.logits_BN.shape[1]):
                if not decision.candidates_BN[b, n]:
                    continue
                said, was = float(decision.judge_BN[b, n]), bool(decision.chosen_BN[b, n])
                p = 1 / (1 + math.exp(-said))
                entropy -= math.log(p) if was else math.log1p(-p)
                square += float(decision.logits_BN[b, n]) ** 2
                many += 1
                if decision.selective:
                    judged += 1
                    right += (said >= 0) == was
            found["router"] += counted[b] * entropy / many
            found["router_z"] += counted[b] * square / many
        found["sampling_accuracy"] += counted[b] * right / judged
        found["mean_depth"] += counted[b] * float(depths[b][keep[b]].mean())
    return found


def brute_token(trace: RoutingTrace, routing: Routing, counted: list[float]) -> dict[str, float]:
    R = routing.recursions
    found = dict.fromkeys(("router", "router_z", "mean_depth", *(f"load_{i + 1}" for i in range(R))), 0.0)
    keep = np.ones((B, T), bool) if trace.keep_BT is None else trace.keep_BT.numpy()
    logits, scores, depths = (numbers(t) for t in (trace.depth_logits_BTR, trace.depth_scores_BTR, trace.depths_BT))
    for b in range(B):
        real = [t for t in range(T) if keep[b, t]]
        balance = 0.0
        for i in range(R):
            load = sum(depths[b, t] == i + 1 for t in real) / len(real)
            balance += load * sum(scores[b, t, i] for t in real) / len(real)
            found[f"load_{i + 1}"] += counted[b] * load
        found["router"] += counted[b] * R * balance
        z = [math.log(sum(math.exp(logits[b, t, i]) for i in range(R))) ** 2 for t in real]
        found["router_z"] += counted[b] * sum(z) / len(z)
        found["mean_depth"] += counted[b] * sum(depths[b, t] for t in real) / len(real)
    return found


COUNTED = [7.0, 4.0, 0.0, 3.0]


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", EXPERTS)
def test_expert_choice_against_loops(name: str, padding: bool) -> None:
    for seed in range(3):
        trace = expert_trace(EXPERTS[name], seed, padding)
        found = routing_parts(trace, EXPERTS[name], torch.tensor(COUNTED))
        assert set(found) == set(routing_names(EXPERTS[name]))
        assert {key: float(value) for key, value in found.items()} == pytest.approx(brute_expert(trace, COUNTED), rel=1e-5)


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", TOKENS)
def test_token_choice_against_loops(name: str, padding: bool) -> None:
    for seed in range(3):
        trace = token_trace(TOKENS[name], seed, padding)
        found = routing_parts(trace, TOKENS[name], torch.tensor(COUNTED))
        assert set(found) == set(routing_names(TOKENS[name]))
        expected = brute_token(trace, TOKENS[name], COUNTED)
        assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("routing", [EXPERTS["aux router"], TOKENS["softmax"]], ids=["expert", "token"])
def test_rows_add_up_however_a_batch_is_cut(routing: Routing) -> None:
    make = expert_trace if routing.kind == "expert" else token_trace
    trace, counted = make(routing, 0, True), torch.tensor(COUNTED)
    whole = routing_parts(trace, routing, counted)
    parts = [routing_parts(rows_of(trace, b), routing, counted[b : b + 1]) for b in range(B)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)


def rows_of(trace: RoutingTrace, row: int) -> RoutingTrace:
    def cut(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor[row : row + 1]

    return RoutingTrace(
        [
            Decision(cut(d.logits_BN), cut(d.judge_BN), cut(d.chosen_BN), cut(d.slots_BN), cut(d.candidates_BN), d.selective)
            for d in trace.decisions
        ],
        *(cut(t) for t in (trace.depth_logits_BTR, trace.depth_scores_BTR, trace.depths_BT, trace.keep_BT)),
    )


def test_even_loads_and_scores_have_a_balancing_loss_of_one() -> None:
    """The least that N sum f_i P_i can be for softmax scores when depths are evenly used; one depth for all gives N."""
    routing = build_routing("token", 3)
    even = token_trace(routing, 0, False)
    even.depth_scores_BTR = torch.full((B, T, 3), 1 / 3)
    found = routing_parts(even, routing, torch.ones(B))
    assert float(found["router"]) == pytest.approx(B)
    lost = token_trace(routing, 0, False)
    lost.depth_scores_BTR = torch.tensor([1.0, 0.0, 0.0]).expand(B, T, 3)
    lost.depths_BT = torch.ones(B, T, dtype=torch.long)
    assert float(routing_parts(lost, routing, torch.ones(B))["router"]) == pytest.approx(3 * B)


def test_loads_pass_no_gradient_and_scores_do() -> None:
    routing = TOKENS["softmax"]
    trace = token_trace(routing, 0, True)
    logits = trace.depth_logits_BTR.requires_grad_()
    trace.depth_scores_BTR = logits.softmax(-1)
    found = routing_parts(trace, routing, torch.tensor(COUNTED))
    (slope,) = torch.autograd.grad(found["router"], logits)
    assert not slope[2].any(), "the row without a target"
    assert not slope[1, 4:].any(), "padding"
    assert slope[0].any()
    assert not found["load_1"].requires_grad


def test_weights_are_the_thesis_choices_until_a_recipe_says_otherwise() -> None:
    plain, own = RoutingLossRecipe(), RoutingLossRecipe(coefficient=0.3, z=0.02)
    expected = {
        EXPERTS["falling"]: (0.001, 0.0),
        EXPERTS["aux router"]: (1.0, 0.0),
        TOKENS["softmax"]: (0.1, 0.001),
        TOKENS["loss-free"]: (0.0, 0.001),
    }
    for routing, (weight, z) in expected.items():
        assert (plain.weight(routing), plain.z_weight(routing)) == (weight, z)
        assert (own.weight(routing), own.z_weight(routing)) == (0.3, 0.02)


@pytest.mark.parametrize("steps", [1, 5, 8, 100])
def test_a_warm_up_comes_down_in_equal_stairs(steps: int) -> None:
    recipe = RoutingLossRecipe(capacity_warmup=steps)
    found = [openness(recipe, step) for step in range(steps + 3)]
    assert found[0] == 1.0
    assert found[steps:] == [0.0] * 3
    assert found == sorted(found, reverse=True)
    assert set(found[:steps]) <= {1 - stair / STAIRS for stair in range(STAIRS)}
    if steps >= STAIRS:
        assert len(set(found)) == STAIRS + 1
    assert openness(RoutingLossRecipe(), 0) == 0.0
