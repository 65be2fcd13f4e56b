"""The numbers of a routing analysis against ones that are counted token by token."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fathomlm.depth import DepthPlan
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab import token_rows
from fathomlm.lab.analyze.depth_limits import measure_limits
from fathomlm.lab.analyze.routing import RoutingNumbers, check_routed, measure
from fathomlm.lab.analyze.routing_meters import GainMeter
from fathomlm.lab.analyze.routing_report import flops_table, routing_table, scaling_table, score_table
from fathomlm.lab.token_rows import TokenRows, find, read_rows
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, RoutingTrace
from fathomlm.model.route.trace import RoutingMeter
from fathomlm.train.losses.head import HeadTerms, head_loss
from lab.analyze.tiny import TEXT, model_of, text_file

pytestmark = pytest.mark.usefixtures("one_thread")
CASES: dict[str, dict[str, Any]] = {
    "expert": {},
    "expert, aux router": {"sampling": "aux_router", "score": "tanh", "capacity": [0.75, 0.5, 0.25]},
    "expert, shared": {"kv": "share"},
    "expert, hybrid": {"kv": "hybrid"},
    "expert, random": {"random": True},
    "token": {"router": "token"},
    "token, loss free": {"router": "token", "balancing": "loss_free", "score": "sigmoid", "kv": "hybrid"},
}


@dataclasses.dataclass
class Case:
    model: FathomForCausalLM
    rows: TokenRows
    numbers: RoutingNumbers

    @property
    def decoder(self) -> Any:
        return self.model.decoder

    @property
    def expert(self) -> bool:
        return self.numbers.router == "expert"


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = model_of(**CASES[request.param])
    rows = read_rows(find([text_file(tmp_path_factory.mktemp("data"))]), model, context=48, rows=6)
    return Case(model, rows, measure(model, rows, samples=2, seen=3))


@torch.no_grad()
def causal_pass(case: Case, depth: int | None = None) -> tuple[RoutingTrace, torch.Tensor]:
    trace = RoutingTrace()
    hidden = case.decoder(case.rows.tokens_NT, control=DepthControl(max_depth=depth), trace=trace)
    log_p = case.decoder.logits(hidden).log_softmax(-1)
    return trace, log_p.gather(-1, case.rows.targets_NT[..., None])[..., 0]


@torch.no_grad()
def trained_pass(case: Case, causal: bool = False) -> tuple[RoutingTrace, float]:
    trace = RoutingTrace()
    (state,) = case.decoder.states(case.rows.tokens_NT, causal=causal, trace=trace).values()
    normed = case.decoder.norm(state).flatten(0, 1)
    _, ce, _ = head_loss(normed, case.decoder.head_weight, case.rows.targets_NT.flatten(), HeadTerms())
    return trace, float(ce) / case.rows.tokens_NT.numel()


def test_losses_are_those_of_training(case: Case) -> None:
    assert case.numbers.causal_loss == pytest.approx(trained_pass(case, causal=True)[1], abs=1e-5)
    if case.expert:
        assert case.numbers.top_k_loss == pytest.approx(trained_pass(case)[1], abs=1e-5)
        difference = case.numbers.causal_loss - case.numbers.top_k_loss
        assert case.numbers.loss_difference == pytest.approx(difference)
    else:
        assert (case.numbers.top_k, case.numbers.top_k_loss, case.numbers.loss_difference) == (None, None, None)


def test_metrics_are_the_meters(case: Case) -> None:
    routing = case.model.plan.routing
    for found, causal in ((case.numbers.top_k, False), (case.numbers.causal, True)):
        if found is None:
            continue
        meter = RoutingMeter(routing, case.rows.context)
        meter.add(trained_pass(case, causal)[0])
        expected = meter.read()
        if causal:
            expected.pop("sampling_accuracy", None)
        none = found.pop("load_0", None)
        assert found == pytest.approx(expected)
        if none is not None:
            found["load_0"] = none
            assert sum(value for name, value in found.items() if name.startswith("load_")) == pytest.approx(1)


def test_depth_limits_by_hand(case: Case) -> None:
    R = case.model.plan.recursions
    assert [limit.max_depth for limit in case.numbers.scaling] == list(range(1, R + 1))
    for limit in case.numbers.scaling:
        trace, log_p_NT = causal_pass(case, limit.max_depth)
        depths = trace.depths_BT
        assert limit.loss == pytest.approx(-float(log_p_NT.mean()), abs=1e-5)
        assert limit.log_likelihood == pytest.approx(log_p_NT.cumsum(1).mean(0).tolist(), abs=1e-3)
        assert limit.log_likelihood[-1] == pytest.approx(-limit.loss * case.rows.context, rel=1e-5)
        assert limit.running == pytest.approx([float((depths > r).float().mean()) for r in range(R)])
        assert limit.mean_depth == pytest.approx(float(depths.float().mean()))
        assert int(depths.max()) <= limit.max_depth
        assert not any(limit.running[limit.max_depth :])
    flops = [limit.flops_per_token for limit in case.numbers.scaling]
    assert flops == sorted(flops)


def test_limits_alone_are_those_of_the_analysis(case: Case) -> None:
    assert measure_limits(case.model, case.rows) == case.numbers.scaling


def test_without_a_router_a_limit_is_the_depth_of_all_tokens(tmp_path: Path) -> None:
    model = model_of(router=None)
    rows = read_rows(find([text_file(tmp_path)]), model, context=32, rows=4)
    limits = measure_limits(model, rows)
    assert [limit.running for limit in limits] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    one, two, full = (limit.flops_per_token for limit in limits)
    whole = count(model.architecture, model.plan, context=32).forward_flops_per_token
    assert full == whole == two + (two - one)
    with torch.no_grad():
        log_p = model.decoder.logits(model.decoder(rows.tokens_NT)).log_softmax(-1)
    assert limits[-1].loss == pytest.approx(-float(log_p.gather(-1, rows.targets_NT[..., None]).mean()), abs=1e-5)


def test_flops_are_the_counters(case: Case) -> None:
    model, numbers = case.model, case.numbers
    context = {"context": case.rows.context}
    ran = numbers.scaling[-1].running
    assert numbers.flops.nominal == count(model.architecture, model.plan, **context).forward_flops_per_token
    assert numbers.flops.actual == count(model.architecture, model.plan, capacity=ran, **context).forward_flops_per_token
    unrouted = DepthPlan.build("middle-cycle", 3, model.architecture.layers)
    assert numbers.flops.unrouted == count(model.architecture, unrouted, **context).forward_flops_per_token


def test_scores_counted_one_by_one(case: Case) -> None:
    routing, routers = case.model.plan.routing, case.decoder.routers
    trace = trained_pass(case)[0]
    low = -1.0 if routing.score == "tanh" else 0.0
    for histogram in case.numbers.histograms:
        at = histogram.recursion - 1
        if case.expert:
            decision = trace.decisions[at]
            pairs = zip(
                routers.score(decision.judge_BN).flatten().tolist(), decision.chosen_BN.flatten().tolist(), strict=True
            )
        else:
            chosen = trace.depths_BT == histogram.recursion
            pairs = zip(trace.depth_scores_BTR[..., at].flatten().tolist(), chosen.flatten().tolist(), strict=True)
        found: dict[bool, list[float]] = {True: [], False: []}
        for score, chosen in pairs:
            found[chosen].append(score)
        assert (histogram.edges[0], histogram.edges[-1], len(histogram.edges)) == (low, 1.0, 41)
        for counts, mean, scores in (
            (histogram.selected, histogram.selected_mean, found[True]),
            (histogram.unselected, histogram.unselected_mean, found[False]),
        ):
            assert sum(counts) == len(scores)
            assert mean == (pytest.approx(sum(scores) / len(scores), abs=1e-5) if scores else None)
            cells = [min(int((score - low) / (1 - low) * 40), 39) for score in scores]
            moved = sum(abs(count - cells.count(cell)) for cell, count in enumerate(counts))
            assert moved <= 2  # a score on a border may fall to either side
        assert histogram.takes_all == (case.expert and routing.capacity[at] == 1.0)


def test_the_causal_rule_has_a_threshold(case: Case) -> None:
    routing = case.model.plan.routing
    if routing.kind == "token" or routing.random:
        assert case.numbers.threshold is None
    else:
        assert case.numbers.threshold == {"sigmoid": 0.5, "tanh": 0.0}[routing.score]


def test_deep_and_shallow_tokens_counted_one_by_one(case: Case) -> None:
    depths = defaultdict(list)
    trace, _ = causal_pass(case)
    for token, depth in zip(case.rows.tokens_NT.flatten().tolist(), trace.depths_BT.flatten().tolist(), strict=True):
        depths[token].append(depth)
    often = {token: sum(found) / len(found) for token, found in depths.items() if len(found) >= 3}
    deepest, shallowest = case.numbers.deepest, case.numbers.shallowest
    assert deepest[0].mean_depth == max(often.values())
    assert shallowest[0].mean_depth == min(often.values())
    assert [each.mean_depth for each in deepest] == sorted((each.mean_depth for each in deepest), reverse=True)
    assert [each.mean_depth for each in shallowest] == sorted(each.mean_depth for each in shallowest)
    listed = [each.token for each in (*deepest, *shallowest)]
    assert len(listed) == len(set(listed)) == min(len(often), 40)
    for each in (*deepest, *shallowest):
        assert (each.count, each.mean_depth) == (len(depths[each.token]), pytest.approx(often[each.token]))
        assert each.text == case.rows.tokenizer.decode([each.token]) or each.token > 127


def test_samples_are_the_text_with_its_depths(case: Case) -> None:
    trace, _ = causal_pass(case)
    assert len(case.numbers.samples) == 2
    for row, sample in enumerate(case.numbers.samples):
        assert [token.token for token in sample] == case.rows.tokens_NT[row].tolist()
        assert [token.depth for token in sample] == trace.depths_BT[row].tolist()
        assert "".join(token.text for token in sample) == TEXT.encode()[row * 48 : row * 48 + 48].decode(errors="replace")
        for token in sample:
            asked = [score is not None for score in token.scores]
            if case.expert:  # asked up to the recursion that turned it away
                assert asked == [place <= token.depth for place in range(3)]
            else:
                assert asked == [True] * 3


def test_rows_may_come_in_any_batches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rows, "HELD", 2 * case.rows.context)
    told = []
    again = measure(case.model, case.rows, samples=2, seen=3, on_rows=lambda done, total: told.append((done, total)))
    assert told == [(2, 6), (4, 6), (6, 6)]
    assert again.summary()["causal"] == pytest.approx(case.numbers.summary()["causal"])
    assert again.causal_loss == pytest.approx(case.numbers.causal_loss, abs=1e-6)
    assert [each.selected for each in again.histograms] == [each.selected for each in case.numbers.histograms]
    assert (again.deepest, again.shallowest) == (case.numbers.deepest, case.numbers.shallowest)
    assert [[t.depth for t in s] for s in again.samples] == [[t.depth for t in s] for s in case.numbers.samples]


def test_records_are_json_and_tables_have_a_shape(case: Case) -> None:
    whole = json.loads(json.dumps(case.numbers.to_dict(), allow_nan=False))
    assert whole["loss_difference"] == case.numbers.loss_difference
    assert "log_likelihood" not in json.dumps(case.numbers.summary())
    for table in (
        routing_table(case.numbers),
        flops_table(case.numbers),
        score_table(case.numbers),
        scaling_table(case.numbers),
    ):
        assert len({len(row) for row in table}) == 1
    assert sum(case.numbers.depth_shares().values()) == pytest.approx(1)


def test_only_routed_models() -> None:
    for plan in (None, DepthPlan.build("cycle", 2, 4)):
        with pytest.raises(OptionError, match=r"here has no router.*--router expert.*tiny-mor"):
            check_routed(plan, "here")


def test_a_router_that_lets_nobody_pass(tmp_path: Path) -> None:
    """Even with all tokens at depth 0, numbers are numbers."""
    model = model_of(capacity=[0.9, 0.5, 0.25], sampling="aux_router")
    rows = read_rows(find([text_file(tmp_path)]), model, context=32, rows=2)
    with torch.no_grad():
        for router in model.decoder.routers.aux:
            router.out.weight.zero_()
    everyone = measure(model, rows)
    assert everyone.causal["load_3"] == 1.0
    biased = _Never()
    model.decoder.routers.aux = torch.nn.ModuleList([biased] * 3)
    numbers = measure(model, rows)
    assert (numbers.causal["load_0"], numbers.causal["mean_depth"]) == (1.0, 0.0)
    assert numbers.depth_shares() == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}
    assert 0 < numbers.flops.actual < numbers.flops.nominal
    assert all(token.depth == 0 for sample in numbers.samples for token in sample)


class _Never(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((*x.shape[:-1], 1), -1.0)


def test_a_model_that_is_broken_is_named(tmp_path: Path) -> None:
    model = model_of()
    rows = read_rows(find([text_file(tmp_path)]), model, context=32, rows=2)
    with torch.no_grad():
        model.decoder.layers[0].mlp.down.weight.fill_(math.nan)
    with pytest.raises(OptionError, match="not finite"):
        measure(model, rows)


def test_long_chunks_and_short_ones_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.lab.analyze import depth_limits

    model = model_of()
    hidden, targets = torch.randn(3, 10, 16), torch.randint(0, 257, (3, 10))
    whole = depth_limits.token_losses(model.decoder, hidden, targets)
    expected = F.cross_entropy(model.decoder.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none")
    assert torch.allclose(whole.flatten(), expected, atol=1e-6)
    monkeypatch.setattr(depth_limits, "default_chunk", lambda device, vocab: 7)
    assert torch.allclose(depth_limits.token_losses(model.decoder, hidden, targets), whole, atol=1e-6)


@torch.no_grad()
def test_gains_are_those_of_passes_at_given_depths(case: Case) -> None:
    """Token by token: every recursion for all, and the routers' own depths given as such."""
    gain, R = case.numbers.gain, len(case.numbers.capacity)
    trace, own = causal_pass(case)
    assert trace.depths_BT is not None
    _, one = causal_pass(case, 1)

    def given(depths: torch.Tensor) -> torch.Tensor:
        hidden = case.decoder(case.rows.tokens_NT, control=DepthControl(depths_BT=depths))
        return case.decoder.logits(hidden).log_softmax(-1).gather(-1, case.rows.targets_NT[..., None])[..., 0]

    torch.testing.assert_close(given(trace.depths_BT), own)
    full = given(torch.full_like(trace.depths_BT, R))
    assert sum(row.share for row in gain.by_depth) == pytest.approx(1)
    for row in gain.by_depth:
        chosen = trace.depths_BT == row.depth
        assert row.share == pytest.approx(float(chosen.double().mean()))
        for found, log_p in ((row.one_loss, one), (row.loss, own), (row.full_loss, full)):
            assert found == pytest.approx(-float(log_p[chosen].mean()), rel=1e-5)
    assert gain.loss == pytest.approx(case.numbers.causal_loss, rel=1e-6)
    assert gain.routing_gain == pytest.approx(gain.shuffled_loss - gain.loss, abs=1e-9)
    deep, potential = trace.depths_BT.double().flatten(), (full - one).double().flatten()
    if gain.correlation is not None:
        assert gain.correlation == pytest.approx(float(torch.corrcoef(torch.stack((deep, potential)))[0, 1]), abs=1e-5)


def test_shuffled_depths_cost_the_same_and_a_single_depth_gains_nothing() -> None:
    depths = torch.tensor([[1, 2, 3, 3], [1, 1, 1, 2]])
    seen: list[torch.Tensor] = []

    def losses(control: DepthControl) -> torch.Tensor:
        assert control.depths_BT is not None
        seen.append(control.depths_BT)
        return 5.0 - control.depths_BT.double() * torch.tensor([[0.0, 1.0, 1.0, 1.0]])

    meter = GainMeter(3)
    meter.add(losses, depths, torch.full((2, 4), 4.0), losses(DepthControl(depths_BT=depths)))
    found = meter.read()
    assert torch.equal(seen[-1].sort(1).values, depths.sort(1).values)
    assert [row.depth for row in found.by_depth] == [1, 2, 3]
    alike = GainMeter(3)
    alike.add(losses, torch.full((2, 4), 2), torch.full((2, 4), 4.0), losses(DepthControl(depths_BT=torch.full((2, 4), 2))))
    assert (alike.read().routing_gain, alike.read().correlation) == (0.0, None)
