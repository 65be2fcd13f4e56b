"""Routed inference: what it computes, that it sees no future, and that padding has no say in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.cache import build_cache
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import DepthControl, RoutingTrace
from model.route.slow import slow_causal
from model.route.small import KV, LOOPS, ROUTERS, decoder_of, model_of, padded, routed, routed_cases, same, some_tokens
from pairwise import cover

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def decoder(plan: DepthPlan) -> Decoder:
    return decoder_of(plan)


def last_state(decoder: Decoder, tokens: Tensor, trace: RoutingTrace | None = None) -> Tensor:
    return decoder.states(tokens, causal=True, trace=trace)[decoder.plan.unrolled_layers - 1]


@torch.inference_mode()
@routed_cases(turn=0)
def test_it_is_the_method_written_out_token_by_token(decoder: Decoder) -> None:
    tokens, trace = some_tokens(2, 10), RoutingTrace()
    got = last_state(decoder, tokens, trace)
    for row in range(2):
        expected, depths = slow_causal(decoder, tokens[row].tolist())
        assert trace.depths_BT is not None
        assert trace.depths_BT[row].tolist() == depths
        same(got[row], expected)
    assert len(set(trace.depths_BT.flatten().tolist())) == decoder.plan.recursions, "every depth must be in use"


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "token"])
def test_windows_count_places_not_entries(router: str, kv: str) -> None:
    decoder, tokens = decoder_of(routed(router, kv), windows=True), some_tokens(2, 12)
    whole = decoder(tokens)
    for row in range(2):
        same(whole[row], decoder.norm(slow_causal(decoder, tokens[row].tolist())[0]))
    same(decoder(tokens, cache=build_cache(decoder.plan)), whole)
    assert not torch.allclose(whole, decoder_of(decoder.plan)(tokens))


@torch.inference_mode()
@routed_cases(turn=1)
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_a_future_token_changes_no_earlier_state(decoder: Decoder, cached: bool) -> None:
    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        trace = RoutingTrace()
        out = decoder(tokens, cache=build_cache(decoder.plan) if cached else None, trace=trace)
        assert trace.depths_BT is not None
        return out, trace.depths_BT

    tokens = some_tokens(2, 12)
    before, depths = run(tokens)
    for at in (1, 6, 11):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 7) % 61
        after, other_depths = run(other)
        same(after[:, :at], before[:, :at])
        assert torch.equal(other_depths[:, :at], depths[:, :at])
        assert (after[:, at] - before[:, at]).abs().amax() > 0.01
        same(decoder.logits(after)[:, :at], decoder.logits(before)[:, :at])


@torch.inference_mode()
@routed_cases(turn=2)
def test_a_left_padded_batch_equals_its_singles(decoder: Decoder) -> None:
    lengths = [12, 5, 9, 1]
    tokens, keep = padded(lengths)
    trace = RoutingTrace()
    together = decoder(tokens, keep_BS=keep, trace=trace)
    assert trace.depths_BT is not None
    assert not trace.depths_BT[~keep].any()
    for row, length in enumerate(lengths):
        alone = RoutingTrace()
        same(together[row, -length:], decoder(tokens[row : row + 1, -length:], trace=alone)[0])
        assert alone.depths_BT is not None
        assert trace.depths_BT[row, -length:].tolist() == alone.depths_BT[0].tolist()


@torch.inference_mode()
@routed_cases(turn=0)
def test_what_stands_in_padding_does_not_matter(decoder: Decoder) -> None:
    tokens, keep = padded([12, 5, 9])
    other = torch.where(keep, tokens, (tokens + 11) % 61)
    expected = decoder(tokens, keep_BS=keep)
    same(decoder(other, keep_BS=keep)[keep], expected[keep])
    assert torch.isfinite(expected).all()


@torch.inference_mode()
@cover(router=["expert", "token"], kv=KV, windows=[False, True])
def test_documents_of_a_row_run_as_if_alone(router: str, kv: str, windows: bool) -> None:
    """Rotary positions are relative, so it does not matter where in a row a document stands."""
    decoder, tokens = decoder_of(routed(router, kv), windows), some_tokens(2, 12)
    lengths = [5, 4, 3]
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    together = decoder.states(tokens, causal=True, documents_BT=documents)[7]
    same(together, torch.cat([last_state(decoder, part) for part in tokens.split(lengths, dim=1)], dim=1))


@torch.inference_mode()
@pytest.mark.parametrize(("router", "kv"), list(zip(ROUTERS, KV * 4, strict=False)))
def test_a_depth_limit_is_the_method_cut_short(router: str, kv: str) -> None:
    decoder, tokens = decoder_of(routed(router, kv)), some_tokens(1, 12)
    for limit in (1, 2):
        trace, control = RoutingTrace(), DepthControl(max_depth=limit)
        got = decoder(tokens, control=control, trace=trace)
        expected, depths = slow_causal(decoder, tokens[0].tolist(), limit)
        assert trace.depths_BT is not None
        assert trace.depths_BT[0].tolist() == depths
        same(got[0], decoder.norm(expected))
        same(decoder(tokens, control=control, cache=build_cache(decoder.plan)), got)
    assert torch.equal(decoder(tokens, control=DepthControl(max_depth=3)), decoder(tokens)), "the whole depth is no limit"


@torch.inference_mode()
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
@pytest.mark.parametrize("router", [router for router in ROUTERS if "random" not in router])
def test_a_depth_bias_moves_tokens(router: str, cached: bool) -> None:
    decoder, tokens = decoder_of(routed(router)), some_tokens(3, 12)

    def mean(bias: float) -> float:
        trace = RoutingTrace()
        cache = build_cache(decoder.plan) if cached else None
        decoder(tokens, control=DepthControl(bias=bias), cache=cache, trace=trace)
        assert trace.depths_BT is not None
        return float(trace.depths_BT.float().mean())

    means = [mean(bias) for bias in (-1e9, -0.5, 0.0, 0.5, 1e9)]
    assert means == sorted(means)
    assert (means[0], means[-1]) == (1.0, 3.0)
    assert means[0] < means[2] < means[-1]


@pytest.mark.parametrize("limit", [0, -1, 4])
@pytest.mark.parametrize("plan", [routed(), routed("token"), LOOPS["middle"]], ids=["expert", "token", "unrouted"])
def test_a_depth_that_the_model_has_not_is_refused(plan: DepthPlan, limit: int) -> None:
    with pytest.raises(OptionError, match=f"max depth must be from 1 to the model's 3 recursions, got {limit}"):
        decoder_of(plan)(some_tokens(1, 3), control=DepthControl(max_depth=limit))


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_bias_that_is_no_number_is_refused(bias: float) -> None:
    with pytest.raises(OptionError, match="the depth bias must be a number"):
        decoder_of(routed())(some_tokens(1, 3), control=DepthControl(bias=bias))


@torch.inference_mode()
@pytest.mark.parametrize("kv", ["cache", "share"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_without_a_router_a_depth_limit_drops_the_last_loops(limit: int, kv: str) -> None:
    """The same weights in a plan that has only so many loops: 1+2+1 layers looped `limit` times."""
    whole = model_of(LOOPS["middle"].with_kv(kv)).decoder  # type: ignore[arg-type]
    fewer = DepthPlan.build("middle-cycle", limit, 2 + 2 * limit)
    fewer = fewer.with_kv(kv) if limit > 1 else fewer  # type: ignore[arg-type]
    short = model_of(fewer).decoder
    short.load_state_dict(whole.state_dict())
    tokens, control = some_tokens(2, 10), DepthControl(max_depth=limit)
    assert torch.equal(whole(tokens, control=control), short(tokens))
    same(whole(tokens, control=control, cache=build_cache(whole.plan)), short(tokens))


@torch.inference_mode()
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_a_first_recursion_may_be_selective_too(cached: bool) -> None:
    """With recursion-wise caching a token may run no recursion at all, and then leaves no entries in the core."""
    plan = routed(capacity=[0.75, 0.5, 0.25])
    decoder, tokens, trace = decoder_of(plan), some_tokens(2, 12), RoutingTrace()
    got = decoder(tokens, cache=build_cache(plan) if cached else None, trace=trace)
    assert trace.depths_BT is not None
    assert 0 in trace.depths_BT
    for row in range(2):
        expected, depths = slow_causal(decoder, tokens[row].tolist())
        assert trace.depths_BT[row].tolist() == depths
        same(got[row], decoder.norm(expected))


def test_another_models_cache_is_refused() -> None:
    decoder = decoder_of(routed())
    with pytest.raises(ValueError, match="a routed model keeps its entries in a RoutedCache"):
        decoder(some_tokens(1, 3), cache=build_cache(LOOPS["middle"]))


def test_a_routed_model_has_no_states_in_between() -> None:
    with pytest.raises(ValueError, match="a routed model has one output"):
        decoder_of(routed()).states(some_tokens(1, 3), at=[2])


TOKEN_CHOICE = [router for router, (kind, _) in ROUTERS.items() if kind == "token"]


@cover(router=TOKEN_CHOICE, kv=KV, where=["plain", "padded in front", "padded behind", "documents", "windows"])
def test_token_choice_by_depth_is_every_recursion_for_every_token(router: str, kv: str, where: str) -> None:
    """Training gathers the tokens that go on; outputs, depths and gradients are those of the walk that runs them all."""
    decoder = decoder_of(routed(router, kv), windows=where == "windows")
    tokens, options, keep = some_tokens(3, 13), {}, torch.ones(3, 13, dtype=torch.bool)
    if where.startswith("padded"):
        tokens, keep = padded([13, 6, 1])
        keep = keep.flip(1) if where.endswith("behind") else keep
        options = {"keep_BS": keep}
    if where == "documents":
        options = {"documents_BT": torch.tensor([[0] * 5 + [1] * 4 + [2] * 4] * 3)}
    weights = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    found = []
    for causal in (False, True):
        trace = RoutingTrace()
        state = decoder.states(tokens, causal=causal, trace=trace, **options)[decoder.plan.unrolled_layers - 1][keep]
        gradients = torch.autograd.grad(state.square().mean(), weights, allow_unused=True)
        found.append((state, trace.depths_BT, gradients))
    (ours, our_depths, our_gradients), (theirs, their_depths, their_gradients) = found
    same(ours, theirs)
    assert torch.equal(our_depths, their_depths)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            same(one, other, 1e-4)


def test_token_choice_runs_as_many_tokens_as_the_deepest_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recursions beyond the first over at most an eighth of the row more than go on."""
    decoder, tokens = decoder_of(routed("token")), some_tokens(2, 64)
    trace, lengths = RoutingTrace(), []
    original = Decoder.run_steps

    def counted(self: Decoder, x: Tensor, steps: Any, *rest: Any, **options: Any) -> Tensor:
        lengths.append((steps[0].part, x.shape[1]))
        return original(self, x, steps, *rest, **options)

    monkeypatch.setattr(Decoder, "run_steps", counted)
    decoder.states(tokens, trace=trace)
    assert trace.depths_BT is not None
    ran = [int((trace.depths_BT > recursion).sum(1).max()) for recursion in range(3)]
    core = [length for part, length in lengths if part == "core"]
    assert core[0] == 64
    assert all(count <= length < count + 8 for count, length in zip(ran[1:], core[1:], strict=True))
    assert core[2] < 64
