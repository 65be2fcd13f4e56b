"""Training by expert-choice: the top k of each row, against the method written out with loops, and its plain limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.depth import DepthPlan, Step
from fathomlm.errors import OptionError
from fathomlm.kernels.rope import rope_table
from fathomlm.model.blocks import StepContext
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import Routers, RoutingTrace, TopKOptions
from model.route.slow import core, slow_causal, slow_top_k
from model.route.small import EXPERTS, KV, LOOPS, ROUTERS, decoder_of, model_of, padded, routed, same, some_tokens
from pairwise import cover, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")

T = 12
PLANS = [(*pair, "middle") for pair in in_turn(EXPERTS, KV, 0)] + [("expert", kv, "cycle") for kv in KV]


def states(decoder: Decoder, tokens: Tensor, **options: Any) -> Tensor:
    return decoder.states(tokens, **options)[decoder.plan.unrolled_layers - 1]


def traced(decoder: Decoder, tokens: Tensor, **options: Any) -> tuple[Tensor, RoutingTrace]:
    trace = RoutingTrace()
    return states(decoder, tokens, trace=trace, **options), trace


@torch.inference_mode()
@pytest.mark.parametrize("plan", [routed(*case) for case in PLANS], ids=["-".join(case) for case in PLANS])
def test_it_is_the_method_written_out_row_by_row(plan: DepthPlan) -> None:
    decoder, tokens = decoder_of(plan), some_tokens(3, T)
    got, trace = traced(decoder, tokens)
    assert trace.depths_BT is not None
    for row in range(3):
        expected, depths = slow_top_k(decoder, tokens[row].tolist())
        same(got[row], expected)
        assert trace.depths_BT[row].tolist() == depths
    assert torch.equal(got, states(decoder, tokens)), "a trace must change nothing"


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
def test_windows_reach_over_places_that_did_not_go_on(kv: str) -> None:
    decoder, tokens = decoder_of(routed("expert", kv), windows=True), some_tokens(2, T)
    got = states(decoder, tokens)
    for row in range(2):
        same(got[row], slow_top_k(decoder, tokens[row].tolist())[0])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("length", "kept", "kv"),
    [(1, [1, 1, 1], "hybrid"), (2, [2, 1, 1], "share"), (7, [7, 4, 2], "cache"), (9, [9, 6, 3], "hybrid")],
)
def test_the_capacity_is_of_the_whole_length_rounded_down(length: int, kept: list[int], kv: str) -> None:
    """2/3 of 9 and 1/3 of 9 are whole, though their floats are not."""
    decoder, tokens = decoder_of(routed("expert", kv)), some_tokens(2, length)
    got, trace = traced(decoder, tokens)
    assert [decision.chosen_BN.sum(1).tolist() for decision in trace.decisions] == [[k, k] for k in kept]
    for row in range(2):
        same(got[row], slow_top_k(decoder, tokens[row].tolist(), kept=kept)[0])


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("openness", "kept"), [(1.0, [12, 12, 12]), (0.5, [12, 10, 8]), (0.25, [12, 9, 6])])
def test_a_warm_up_keeps_more(openness: float, kept: list[int], kv: str) -> None:
    decoder, tokens = decoder_of(routed("expert", kv)), some_tokens(2, T)
    got = states(decoder, tokens, top_k=TopKOptions(openness))
    for row in range(2):
        same(got[row], slow_top_k(decoder, tokens[row].tolist(), kept=kept)[0])


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, random"])
def test_padding_competes_for_nothing(router: str, kv: str) -> None:
    """Rows of 12, 9, 8 and 3: each keeps its part of its own tokens, not of the length that it is padded to."""
    lengths = [T, 9, 8, 3]
    decoder, (tokens, keep) = decoder_of(routed(router, kv)), padded(lengths)
    got, trace = traced(decoder, tokens, keep_BS=keep)
    assert trace.depths_BT is not None
    assert not trace.depths_BT[~keep].any()
    for decision, part in zip(trace.decisions, (1, 2 / 3, 1 / 3), strict=True):
        assert not decision.chosen_BN[~keep.gather(1, decision.slots_BN)].any()
        assert not decision.chosen_BN[~decision.candidates_BN].any()
        assert decision.chosen_BN.sum(1).tolist() == [int(part * length + 1e-9) for length in lengths]
    assert trace.decisions[2].candidates_BN.sum(1).tolist() == trace.decisions[1].chosen_BN.sum(1).tolist()
    for row, length in enumerate(lengths):
        expected, depths = slow_top_k(decoder, tokens[row].tolist(), pads=T - length)
        same(got[row, T - length :], expected)
        assert trace.depths_BT[row].tolist() == depths
    for row, length in enumerate(lengths):  # on the other side, as training pads
        tokens[row, :length] = tokens[row, T - length :].clone()
    keep = keep.flip(1)
    got = states(decoder, tokens, keep_BS=keep)
    for row, length in enumerate(lengths):
        same(got[row, :length], slow_top_k(decoder, tokens[row, :length].tolist())[0])
    other = torch.where(keep, tokens, (tokens + 5) % 61)
    same(states(decoder, other, keep_BS=keep)[keep], got[keep])


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, random"])
def test_documents_of_a_row_do_not_see_each_other(router: str, kv: str) -> None:
    decoder, tokens = decoder_of(routed(router, kv)), some_tokens(2, T)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
    got = states(decoder, tokens, documents_BT=documents)
    for row in range(2):
        same(got[row], slow_top_k(decoder, tokens[row].tolist(), documents=documents[row].tolist())[0])


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, random", "expert, mlp"])
def test_documents_with_a_capacity_each_know_nothing_of_each_other(router: str, kv: str) -> None:
    decoder, tokens = decoder_of(routed(router, kv)), some_tokens(2, T)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10], dtype=torch.int32)
    options = {"documents_BT": documents, "top_k": TopKOptions(per_document=True)}
    got, trace = traced(decoder, tokens, **options)
    assert trace.depths_BT is not None
    for row in range(2):
        expected, depths = slow_top_k(decoder, tokens[row].tolist(), documents=documents[row].tolist(), per_document=True)
        same(got[row], expected)
        assert trace.depths_BT[row].tolist() == depths
    for row, begin, end in ((0, 0, 5), (0, 5, 9), (0, 9, 12), (1, 2, 12)):  # those that keep a token in every recursion
        if router != "expert, random":  # which draws by the position in the row
            same(got[row, begin:end], states(decoder, tokens[row : row + 1, begin:end])[0], 1e-4)
    for at in (1, 6):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 7) % 61
        moved = (states(decoder, other, **options) - got).abs().amax(-1) > 1e-5
        assert not moved[documents != documents[:, at : at + 1]].any()
        assert moved[:, at].all()


@pytest.mark.parametrize(("router", "kv"), in_turn(EXPERTS, KV, 1))
def test_a_row_alone_is_the_row_beside_longer_ones(router: str, kv: str) -> None:
    """Outputs, depths and gradients; a row of one token among them, and one that is all there is."""
    lengths = [T, 7, 4, 1]
    decoder, (tokens, keep) = decoder_of(routed(router, kv)), padded(lengths)
    tokens, keep = tokens.flip(1), keep.flip(1)  # padded behind, as training does
    weight = decoder.layers[1].get_parameter("mlp.down.weight")

    def learnt(out: Tensor) -> Tensor:
        return torch.autograd.grad(out.square().sum(), weight)[0]

    got, trace = traced(decoder, tokens, keep_BS=keep)
    assert trace.depths_BT is not None
    total = torch.zeros_like(weight)
    for row, length in enumerate(lengths):
        alone, alone_trace = traced(decoder, tokens[row : row + 1, :length])
        assert alone_trace.depths_BT is not None
        same(got[row, :length], alone[0])
        assert trace.depths_BT[row, :length].tolist() == alone_trace.depths_BT[0].tolist()
        total += learnt(alone)
    same(learnt(got[keep]), total, 1e-4)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, mlp", "expert, random"])
@pytest.mark.parametrize("exact", [0.5, 0.25, 0.1, 0.0])
def test_a_smooth_warm_up_in_the_shapes_of_a_stair(router: str, kv: str, exact: float) -> None:
    """What a capacity in between does in shapes of its own, gradients included."""
    decoder, tokens = decoder_of(routed(router, kv)), some_tokens(2, T)
    smooth = states(decoder, tokens, top_k=TopKOptions(0.5, torch.tensor(exact, dtype=torch.float64)))
    expected = states(decoder, tokens, top_k=TopKOptions(exact))
    same(smooth, expected)
    weights = [decoder.layers[1].get_parameter("mlp.down.weight"), decoder.routers.get_parameter("main.1.out.weight")]
    for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (smooth, expected)), strict=True):
        same(ours, theirs, 1e-4)


@torch.inference_mode()
def test_random_routing_differs_from_row_to_row_and_leaves_no_position_out() -> None:
    """A draw by position alone gave all rows the same depths, and two thirds of the positions no last recursion ever."""
    from fathomlm.model.route.trace import RoutingMeter

    plan = routed("expert, random")
    decoder, tokens = decoder_of(plan), some_tokens(64, T)
    _, trace = traced(decoder, tokens)
    assert trace.depths_BT is not None
    assert len({tuple(row) for row in trace.depths_BT.tolist()}) > 60
    assert plan.routing is not None
    meter = RoutingMeter(plan.routing, T)
    meter.add(trace)
    assert meter.read()["dead_tokens"] == 0.0
    assert meter.read()["mean_depth"] == pytest.approx(2.0)


def by_hand(decoder: Decoder, tokens: Tensor) -> Tensor:
    """x <- x + f(x) for every token in every recursion, over plain causal attention."""
    length = tokens.shape[1]
    cos, sin = rope_table(decoder.architecture.rope, 6, torch.arange(length)[None], torch.float32)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

    def run(x: Tensor, steps: list[Step]) -> Tensor:
        for step in steps:
            x = decoder.layers[step.layer](x, StepContext(cos, sin, mask, False, None, None, None))
        return x

    x = run(decoder.embed(tokens), [decoder.plan.steps[0]])
    for recursion in range(3):
        x = x + run(x, core(decoder, recursion))
    return run(x, [decoder.plan.steps[-1]])


ALL = [1.0, 1.0, 1.0]


@pytest.fixture
def score_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routers, "score", lambda self, logits: torch.ones_like(logits))


@torch.inference_mode()
@pytest.mark.usefixtures("score_of_one")
@pytest.mark.parametrize("causal", [False, True], ids=["top-k", "causal"])
def test_everyone_at_weight_one_adds_the_whole_block(causal: bool) -> None:
    decoder, tokens = decoder_of(routed(capacity=ALL, alpha=1.0)), some_tokens(2, T)
    same(states(decoder, tokens, causal=causal), by_hand(decoder, tokens))


@torch.inference_mode()
@pytest.mark.usefixtures("score_of_one")
@cover(kv=KV, loop=LOOPS, causal=[False, True])
def test_everyone_interpolated_to_the_end_is_the_plain_recursive_model(kv: str, loop: str, causal: bool) -> None:
    """Hybrid writes all of its own entries then, so that it is the model without sharing."""
    plan = routed("expert, interpolate", kv, loop, capacity=ALL[: LOOPS[loop].recursions])
    decoder = model_of(plan).decoder
    plain = Decoder(decoder.architecture, LOOPS[loop].with_kv("share" if kv == "share" else "cache"))
    plain.load_state_dict({name: t for name, t in decoder.state_dict().items() if "routers" not in name})
    tokens = some_tokens(2, T)
    same(states(decoder, tokens, causal=causal), states(plain, tokens))
    same(decoder(tokens), plain(tokens))


@torch.inference_mode()
@pytest.mark.parametrize(("router", "kv"), in_turn(EXPERTS, KV, 2))
def test_where_everyone_goes_on_training_is_inference(router: str, kv: str) -> None:
    decoder, tokens = decoder_of(routed(router, kv, capacity=ALL)), some_tokens(2, T)
    same(states(decoder, tokens), states(decoder, tokens, causal=True))
    same(states(decoder, tokens)[0], slow_causal(decoder, tokens[0].tolist())[0])


def gradients(loss: Tensor, decoder: Decoder) -> dict[str, float]:
    decoder.zero_grad()
    loss.backward()
    return {n: 0.0 if p.grad is None else float(p.grad.abs().amax()) for n, p in decoder.named_parameters()}


@pytest.mark.parametrize(("router", "kv"), in_turn(ROUTERS, KV, 0))
def test_gradients_reach_every_router(router: str, kv: str) -> None:
    decoder, tokens = model_of(routed(router, kv)).decoder, some_tokens(3, T)
    out, trace = traced(decoder, tokens)
    reached = gradients(decoder.logits(decoder.norm(out)).logsumexp(-1).sum(), decoder)
    silent = {name for name, size in reached.items() if size == 0}
    assert silent == {n for n in reached if ".aux." in n or n == "routers.bias"}
    if decoder.routers.routing.kind == "token":
        assert float(decoder.routers.main[0].out.weight.grad.abs().amax(1).amin()) > 0, "each depth is weighed"
    for recursion, decision in enumerate(trace.decisions):
        again = traced(decoder, tokens)[1].decisions[recursion]
        reached = gradients(again.judge_BN.sum(), decoder)
        name = f"routers.{'aux' if decoder.routers.aux else 'main'}.{recursion}."
        assert all(size > 0 for key, size in reached.items() if key.startswith(name))
        assert (reached["embed.weight"] > 0) == (not decoder.routers.aux), "an auxiliary router does not move the stream"
        assert decision.selective == (recursion > 0)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, mlp", "expert, interpolate", "token", "token, last"])
def test_gradients_are_those_of_the_method_written_out(router: str, kv: str) -> None:
    decoder, tokens = model_of(routed(router, kv)).decoder, some_tokens(1, T)
    weigh, found = torch.randn(T, 24, generator=torch.Generator().manual_seed(1)), []
    slow = slow_top_k if router.startswith("expert") else slow_causal
    for out in (states(decoder, tokens)[0], slow(decoder, tokens[0].tolist())[0]):
        decoder.zero_grad()
        (out * weigh).sum().backward()
        found.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[1].items():
        near = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(found[0][name], expected, rtol=1e-3, atol=near, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "token"])
def test_a_row_of_nothing_but_padding_does_no_harm(router: str, kv: str) -> None:
    decoder, tokens = model_of(routed(router, kv)).decoder, some_tokens(2, T)
    keep = torch.tensor([[True], [False]]).expand(2, T)
    out, trace = traced(decoder, tokens, keep_BS=keep)
    same(out[0], states(decoder, tokens[:1])[0])
    assert trace.depths_BT is not None
    assert not trace.depths_BT[1].any()
    assert all(math.isfinite(size) for size in gradients(out[0].square().sum(), decoder).values())


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "token", "token, last"])
def test_under_autocast_the_stream_is_narrow_and_scores_are_wide(router: str, kv: str) -> None:
    decoder = decoder_of(routed(router, kv))
    with torch.autocast("cpu", torch.bfloat16):
        out, trace = traced(decoder, some_tokens(2, T))
    assert out.dtype == torch.bfloat16
    logits = [decision.logits_BN for decision in trace.decisions] or [trace.depth_logits_BTR]
    assert {each.dtype for each in logits if each is not None} == {torch.float32}


@pytest.mark.parametrize("recompute", ["recursion", "layer"])
@pytest.mark.parametrize("router", ["expert", "token"])
def test_recomputed_gradients_are_the_same(router: str, recompute: str) -> None:
    decoder, tokens = model_of(routed(router)).decoder, some_tokens(2, T)
    found = []
    for how in ("none", recompute):
        decoder.zero_grad()
        states(decoder, tokens, recompute=how).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        same(found[1][name], expected)


@pytest.mark.parametrize("kv", ["share", "hybrid"])
def test_entries_that_outlive_a_step_cannot_be_recomputed(kv: str) -> None:
    decoder = decoder_of(routed("expert", kv))
    with pytest.raises(OptionError, match=f"recompute: layer cannot be combined with kv mode '{kv}'"):
        decoder.states(some_tokens(1, 4), recompute="layer")
    with torch.no_grad():
        decoder.states(some_tokens(1, 4), recompute="layer")
