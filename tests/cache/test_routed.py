"""The routed cache: decoding equals one causal forward, and each recursion holds entries for the tokens that ran it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.cache import DenseCache, RoutedCache, build_cache
from fathomlm.depth import DepthPlan
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import DepthControl, RoutingTrace
from model.route.small import FEW, KV, LOOPS, decoder_of, padded, routed, routed_cases, same, some_tokens
from pairwise import cover, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")

ENTRY_BYTES = 2 * 2 * 6 * 4
"""A key and a value, two heads of six, four bytes each."""
T = 14


@pytest.fixture
def decoder(plan: DepthPlan) -> Decoder:
    return decoder_of(plan)


def routed_cache(decoder: Decoder) -> RoutedCache:
    cache = build_cache(decoder.plan)
    assert isinstance(cache, RoutedCache)
    return cache


def in_chunks(decoder: Decoder, tokens: Tensor, cache: RoutedCache, widths: list[int], **options: Any) -> Tensor:
    """Tokens behind what the cache holds, so many at a time."""
    keep = options.pop("keep_BS", None)
    outs = []
    for chunk in tokens.split(widths, dim=1):
        seen = None if keep is None else keep[:, : cache.length + chunk.shape[1]]
        outs.append(decoder(chunk, cache=cache, keep_BS=seen, **options))
    return torch.cat(outs, dim=1)


def depths_of(decoder: Decoder, tokens: Tensor, **options: Any) -> Tensor:
    trace = RoutingTrace()
    decoder(tokens, trace=trace, **options)
    assert trace.depths_BT is not None
    return trace.depths_BT


@torch.inference_mode()
@routed_cases(turn=0, routers=FEW)
def test_prefill_and_decode_equal_one_forward(decoder: Decoder) -> None:
    tokens, cache = some_tokens(2, T), routed_cache(decoder)
    same(in_chunks(decoder, tokens, cache, [8] + [1] * 6), decoder(tokens))
    assert cache.length == T


@torch.inference_mode()
@cover(router=["expert", "token"], kv=KV, widths=[[1] * T, [3, 7, 4], [1, 6, 1, 6], [T]])
def test_uneven_chunks_equal_one_forward(router: str, kv: str, widths: list[int]) -> None:
    for windows in (False, True):
        decoder, tokens = decoder_of(routed(router, kv), windows), some_tokens(3, T, seed=5)
        same(in_chunks(decoder, tokens, routed_cache(decoder), widths), decoder(tokens))


@torch.inference_mode()
@routed_cases(turn=1, routers=FEW)
def test_a_left_padded_batch_equals_its_singles(decoder: Decoder) -> None:
    lengths = [8, 3, 1]
    prompt, keep = padded(lengths)
    follow = some_tokens(3, 3, seed=9)
    keep = torch.cat((keep, torch.ones_like(follow, dtype=torch.bool)), dim=1)
    cache = routed_cache(decoder)
    together = in_chunks(decoder, torch.cat((prompt, follow), dim=1), cache, [8, 1, 2], keep_BS=keep)
    for row, length in enumerate(lengths):
        tokens, own = torch.cat((prompt[row, -length:], follow[row]))[None], routed_cache(decoder)
        alone = in_chunks(decoder, tokens, own, [length, 1, 2])
        same(together[row, -length - 3 :], alone[0])
        same(alone, decoder(tokens))
        for recursion in range(decoder.plan.recursions):
            held = cache.entries(recursion)
            assert (held[row] if held else 0) == sum(own.entries(recursion))


@torch.inference_mode()
@routed_cases(turn=2, routers=FEW)
def test_padding_in_the_middle_of_nothing_leaves_no_entries(decoder: Decoder) -> None:
    """A first chunk may hold nothing but padding in some rows."""
    tokens, keep = padded([9, 2, 9])
    same(
        in_chunks(decoder, tokens, routed_cache(decoder), [4, 3, 2], keep_BS=keep)[keep], decoder(tokens, keep_BS=keep)[keep]
    )


@torch.inference_mode()
@routed_cases(turn=0, routers=FEW)
def test_entries_and_bytes_are_those_of_the_tokens_routed_there(decoder: Decoder) -> None:
    tokens, keep = padded([T, 5, 9], seed=11)
    plan, depths, cache = decoder.plan, depths_of(decoder, tokens, keep_BS=keep), routed_cache(decoder)
    in_chunks(decoder, tokens, cache, [6, 5] + [1] * (T - 11), keep_BS=keep)
    for recursion in range(plan.recursions):
        assert cache.entries(recursion) == (depths > recursion).sum(1).tolist()
    dense = sum(step.part != "core" for step in plan) * 3 * T
    stored = [step for step in plan if step.part == "core" and (plan.kv != "share" or step.recursion == 0)]
    routed_there = sum(int((depths > step.recursion).sum()) for step in stored)
    assert cache.bytes() == ENTRY_BYTES * (dense + routed_there)
    every = DenseCache(plan.with_kv("cache").with_routing(None))
    decoder_of(plan.with_kv("cache").with_routing(None))(tokens, cache=every)
    assert cache.bytes() < every.bytes() == ENTRY_BYTES * 8 * 3 * T


@torch.inference_mode()
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("kv", KV)
def test_what_a_depth_limit_leaves_out_is_not_stored(kv: str, limit: int) -> None:
    decoder, tokens = decoder_of(routed("token", kv)), some_tokens(2, T)
    cache = routed_cache(decoder)
    control = DepthControl(max_depth=limit)
    in_chunks(decoder, tokens, cache, [8, 6], control=control)
    depths = depths_of(decoder, tokens, control=control)
    assert depths.max() == limit
    for recursion in range(limit):
        assert cache.entries(recursion) == (depths > recursion).sum(1).tolist()
    assert [cache.entries(recursion) for recursion in range(limit, 3)] == [[]] * (3 - limit)


@torch.inference_mode()
@routed_cases(turn=1, routers=FEW)
def test_after_truncation_it_goes_on_as_if_fresh(decoder: Decoder) -> None:
    tokens, cache = some_tokens(2, T), routed_cache(decoder)
    in_chunks(decoder, tokens, cache, [9, 1, 4])
    for length in (10, 4, 0):
        cache.truncate(length)
        depths = depths_of(decoder, tokens[:, :length]) if length else torch.zeros(2, 0)
        for recursion in range(decoder.plan.recursions):
            assert cache.entries(recursion) == (depths > recursion).sum(1).tolist()
        unbroken = routed_cache(decoder)
        if length:
            decoder(tokens[:, :length], cache=unbroken)
        assert cache.bytes() == unbroken.bytes()
        fresh = some_tokens(2, 5, seed=length)
        expected = decoder(torch.cat((tokens[:, :length], fresh), dim=1))[:, length:]
        same(in_chunks(decoder, fresh, cache, [4, 1]), expected)
    cache.truncate(99)
    assert cache.length == 5


@torch.inference_mode()
@pytest.mark.parametrize(("stop_at", "kv"), in_turn(range(1, 9), KV, turn=0))
def test_a_pass_that_was_broken_off_can_be_forgotten(kv: str, stop_at: int) -> None:
    """By then some steps have stored the new tokens and others have not."""
    decoder, tokens = decoder_of(routed("token", kv)), some_tokens(2, T)
    cache, expected, ran = routed_cache(decoder), decoder(tokens), 0
    in_chunks(decoder, tokens[:, :6], cache, [5, 1])

    def stop(*_: Any) -> None:
        nonlocal ran
        ran += 1
        if ran == stop_at:
            raise KeyboardInterrupt

    hooks = [layer.mlp.register_forward_pre_hook(stop) for layer in decoder.layers]
    with pytest.raises(KeyboardInterrupt):
        decoder((tokens[:, 6:] + 1) % 61, cache=cache)
    for hook in hooks:
        hook.remove()
    cache.truncate(cache.length)
    same(in_chunks(decoder, tokens[:, 6:], cache, [2] + [1] * 6), expected[:, 6:])


SHARED = {
    "plain, cycle": DepthPlan.vanilla(8).with_kv("share", "cycle", 2),
    "plain, sequence": DepthPlan.vanilla(8).with_kv("share", "sequence", 2),
    "plain, middle-cycle": DepthPlan.vanilla(8).with_kv("share", "middle-cycle", 2),
    "plain, middle-sequence": DepthPlan.vanilla(8).with_kv("share", "middle-sequence", 3),
    "plain, cycle-rev": DepthPlan.vanilla(8).with_kv("share", "cycle-rev", 4),
    "looped, cycle": LOOPS["cycle"].with_kv("share"),
    "looped, sequence": DepthPlan.build("sequence", 2, 8).with_kv("share"),
    "looped, cycle-rev": DepthPlan.build("cycle-rev", 2, 8).with_kv("share"),
    "looped, middle-cycle": LOOPS["middle"].with_kv("share"),
}


@torch.inference_mode()
@pytest.mark.parametrize("windows", [False, True], ids=["", "windows"])
@pytest.mark.parametrize("name", SHARED)
def test_sharing_without_a_router_decodes_as_it_runs(name: str, windows: bool) -> None:
    plan = SHARED[name]
    decoder, cache = decoder_of(plan, windows), build_cache(plan, reserve=4)
    assert isinstance(cache, DenseCache)
    tokens, keep = padded([T, 4, 9])
    expected = decoder(tokens, keep_BS=keep)
    same(in_chunks(decoder, tokens, cache, [5, 3] + [1] * 6, keep_BS=keep)[keep], expected[keep])  # type: ignore[arg-type]
    for row, length in enumerate([T, 4, 9]):
        same(decoder(tokens[row : row + 1, -length:])[0], expected[row, -length:])
    other = tokens.clone()
    other[:, 10] += 1
    same(decoder(other % 61, keep_BS=keep)[:, 4:10][keep[:, 4:10]], expected[:, 4:10][keep[:, 4:10]])
    stores = sum(not plan.reads_kv(step) for step in plan)
    assert stores < 8
    assert cache.bytes() == ENTRY_BYTES * stores * 3 * T
    cache.truncate(6)
    same(decoder(tokens[:, 6:], cache=cache, keep_BS=keep)[keep[:, 6:]], expected[:, 6:][keep[:, 6:]])


@torch.inference_mode()
@pytest.mark.parametrize("name", SHARED)
def test_sharing_is_not_the_same_model(name: str) -> None:
    """Otherwise the test above could not fail."""
    shared, own = decoder_of(SHARED[name]), decoder_of(SHARED[name].with_kv("cache"))
    assert all(torch.equal(a, b) for a, b in zip(shared.parameters(), own.parameters(), strict=True))
    assert not torch.allclose(shared(some_tokens(1, 6)), own(some_tokens(1, 6)), atol=0.01)
