"""Routing metrics against sums written out token by token, on made-up traces and on a model's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fathomlm.depth import Routing, build_routing
from fathomlm.depth.cost import count
from fathomlm.model.route import RoutingTrace
from fathomlm.model.route.expert import agreement
from fathomlm.model.route.trace import Decision, RoutingMeter
from model.route.small import LLAMA, decoder_of, padded, routed, some_tokens

LENGTH, R = 10, 3
EXPERT = build_routing("expert", R)
TOKEN = build_routing("token", R)


def made_up(routing: Routing, seed: int, padding: bool = True) -> RoutingTrace:
    """A pass of four rows: each recursion asks a part of the tokens before it, and judges as it likes."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    keep = rand(4, LENGTH) < 0.8 if padding else None
    trace = RoutingTrace(keep_BT=keep)
    if routing.kind == "token":
        trace.depth_logits_BTR = rand(4, LENGTH, R)
        trace.depth_scores_BTR = trace.depth_logits_BTR.softmax(-1)
        trace.depths_BT = (rand(4, LENGTH) * R).long() + 1
    else:
        trace.depths_BT = torch.zeros(4, LENGTH, dtype=torch.long)
        candidates = torch.ones(4, LENGTH, dtype=torch.bool) if keep is None else keep
        for recursion, part in enumerate(routing.capacity):
            chosen = candidates & (rand(4, LENGTH) < (0.6 if part < 1 else 2.0))
            slots = torch.arange(LENGTH).expand(4, -1)
            logits = rand(4, LENGTH) - 0.5
            trace.decisions.append(Decision(logits, logits, chosen, slots, candidates, part < 1))
            trace.depths_BT = trace.depths_BT + chosen.long()
            candidates = chosen
            assert recursion or chosen.any()
    if keep is not None:
        trace.depths_BT = trace.depths_BT * keep
    return trace


def brute(routing: Routing, traces: list[RoutingTrace]) -> dict[str, float]:
    depths = np.concatenate([trace.depths_BT.numpy() for trace in traces])
    keep = np.concatenate(
        [np.ones((4, LENGTH), bool) if trace.keep_BT is None else trace.keep_BT.numpy() for trace in traces]
    )
    real = depths[keep]
    found: dict[str, float] = {f"load_{r}": float((real == r).sum() / real.size) for r in range(1, R + 1)}
    found["mean_depth"] = float(real.mean())
    if routing.kind == "token":
        loads = [found[f"load_{r}"] for r in range(1, R + 1)]
        found["max_violation"] = (max(loads) - 1 / R) / (1 / R)
        scores = np.concatenate([trace.depth_scores_BTR.double().numpy() for trace in traces])[keep].mean(0)
        found["entropy"] = float(-(scores * np.log(scores)).sum())
        return found
    right = candidates = 0
    for trace in traces:
        for decision, part in zip(trace.decisions, routing.capacity, strict=True):
            for b in range(4):
                for t in range(LENGTH):
                    if part < 1 and decision.candidates_BN[b, t]:
                        candidates += 1
                        right += bool(decision.judge_BN[b, t] >= 0) == bool(decision.chosen_BN[b, t])
    found["sampling_accuracy"] = right / candidates
    places = [t for t in range(LENGTH) if keep[:, t].any()]
    found["dead_tokens"] = sum(not any(depths[b, t] == R and keep[b, t] for b in range(len(depths))) for t in places) / len(
        places
    )
    return found


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    "routing", [EXPERT, TOKEN, build_routing("expert", R, capacity=[0.9, 0.5, 0.1])], ids=["expert", "token", "selective"]
)
def test_the_meter_against_loops(routing: Routing, padding: bool) -> None:
    meter = RoutingMeter(routing, LENGTH)
    traces = [made_up(routing, seed, padding) for seed in range(3)]
    for i, trace in enumerate(traces):
        meter.add(trace)
        assert meter.read() == pytest.approx(brute(routing, traces[: i + 1]))


@pytest.mark.parametrize("routing", [EXPERT, TOKEN], ids=["expert", "token"])
def test_sums_of_ranks_add_up(routing: Routing) -> None:
    whole, parts = RoutingMeter(routing, LENGTH), [RoutingMeter(routing, LENGTH) for _ in range(2)]
    for seed in range(4):
        whole.add(made_up(routing, seed))
        parts[seed % 2].add(made_up(routing, seed))
    parts[0].sums += parts[1].sums
    torch.testing.assert_close(parts[0].sums, whole.sums)
    assert parts[0].read() == pytest.approx(whole.read())


@pytest.mark.parametrize("routing", [EXPERT, TOKEN], ids=["expert", "token"])
def test_some_rows_of_a_pass(routing: Routing) -> None:
    trace = made_up(routing, 0)
    rows = torch.tensor([True, False, True, True])
    part, whole = RoutingMeter(routing, LENGTH), RoutingMeter(routing, LENGTH)
    part.add(trace, rows)
    assert trace.keep_BT is not None
    trace.keep_BT = trace.keep_BT & rows[:, None]
    for decision in trace.decisions:
        decision.candidates_BN = decision.candidates_BN & rows[:, None]
    whole.add(trace)
    torch.testing.assert_close(part.sums, whole.sums)


def test_a_sure_router_and_one_that_uses_a_single_depth() -> None:
    trace = made_up(TOKEN, 0, padding=False)
    trace.depths_BT = torch.full((4, LENGTH), 2)
    trace.depth_scores_BTR = torch.tensor([0.0, 1.0, 0.0]).expand(4, LENGTH, 3)
    meter = RoutingMeter(TOKEN, LENGTH)
    meter.add(trace)
    assert meter.read() == pytest.approx(
        {"mean_depth": 2.0, "load_1": 0.0, "load_2": 1.0, "load_3": 0.0, "max_violation": 2.0, "entropy": 0.0}
    )


def test_even_scores_have_the_most_entropy() -> None:
    trace = made_up(TOKEN, 0)
    trace.depth_scores_BTR = torch.full((4, LENGTH, 3), 0.7)
    meter = RoutingMeter(TOKEN, LENGTH)
    meter.add(trace)
    assert meter.read()["entropy"] == pytest.approx(math.log(3))


def test_an_empty_meter_reads_without_dividing_by_nothing() -> None:
    for routing in (EXPERT, TOKEN):
        assert all(math.isfinite(value) for value in RoutingMeter(routing, LENGTH).read().values())
        assert len(RoutingMeter(routing, LENGTH).running()) == R


@pytest.mark.parametrize("capacity", [None, [0.75, 0.5, 0.25]], ids=["all run the first", "some run none"])
def test_running_is_the_part_of_all_tokens_that_ran_each_recursion(capacity: list[float] | None) -> None:
    """Tokens that run no recursion count too: `cost.count` takes these as parts of all tokens."""
    plan = routed(capacity=capacity)
    assert plan.routing is not None
    tokens, keep = padded([12, 9])
    trace, meter = RoutingTrace(), RoutingMeter(plan.routing, 12)
    with torch.no_grad():
        decoder_of(plan).states(tokens, causal=True, keep_BS=keep, trace=trace)
    meter.add(trace)
    assert trace.depths_BT is not None
    real = trace.depths_BT[keep]
    expected = [float((real > recursion).double().mean()) for recursion in range(3)]
    assert meter.running() == pytest.approx(expected)
    cost = count(LLAMA, plan, capacity=meter.running(), kv_element_bytes=4)
    assert cost.kv_bytes_per_token == pytest.approx(96 * (2 + 2 * sum(expected)), abs=1)


@pytest.mark.parametrize("causal", [False, True], ids=["top-k", "causal"])
@pytest.mark.parametrize("router", ["expert", "expert, aux router", "token"])
def test_a_models_own_trace(router: str, causal: bool) -> None:
    plan = routed(router)
    assert plan.routing is not None
    trace, meter = RoutingTrace(), RoutingMeter(plan.routing, 12)
    with torch.no_grad():
        decoder_of(plan).states(some_tokens(4, 12), causal=causal, trace=trace)
    meter.add(trace)
    found: dict[str, Any] = meter.read()
    assert trace.depths_BT is not None
    assert found["mean_depth"] == pytest.approx(float(trace.depths_BT.double().mean()))
    if plan.routing.kind == "token":
        return
    if causal:
        assert found["sampling_accuracy"] == 1.0, "the causal rule agrees with itself"
    else:
        assert 0 < found["sampling_accuracy"] < 1
        assert [found[f"load_{r}"] for r in (1, 2, 3)] == pytest.approx([1 / 3] * 3)
        assert meter.running() == pytest.approx([1, 2 / 3, 1 / 3])


def test_agreement_weighs_rows_by_their_counted_tokens() -> None:
    trace = made_up(EXPERT, 5)
    counted = torch.tensor([3.0, 0.0, 7.0, 2.0])
    expected = 0.0
    for b in range(4):
        pairs = [
            (bool(d.judge_BN[b, t] >= 0), bool(d.chosen_BN[b, t]))
            for d in trace.decisions[1:]
            for t in range(LENGTH)
            if d.candidates_BN[b, t]
        ]
        expected += float(counted[b]) * sum(judged == chosen for judged, chosen in pairs) / len(pairs)
    assert float(agreement(trace, counted)) == pytest.approx(expected)
