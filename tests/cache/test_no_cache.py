"""Keys and values within one pass: a step that shares makes none, and hybrid writes over the first recursion's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fathomlm.cache import NoCache, build_cache
from fathomlm.cache.no_cache import Blended, Kept, Overwritten
from fathomlm.depth import DepthPlan
from fathomlm.model.decoder import Decoder
from model.route.small import LOOPS, decoder_of, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def counted(decoder: Decoder) -> Iterator[Counter[tuple[int, str]]]:
    """How often each layer's projections run."""
    calls: Counter[tuple[int, str]] = Counter()

    def counter(layer: int, name: str) -> Callable[..., None]:
        return lambda *_: calls.update([(layer, name)])

    hooks = [
        getattr(layer.attn, name).register_forward_hook(counter(i, name))
        for i, layer in enumerate(decoder.layers)
        for name in ("q", "k", "v")
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def forward(decoder: Decoder, tokens: Tensor) -> int:
    decoder(tokens)
    return 1


def training(decoder: Decoder, tokens: Tensor) -> int:
    decoder.states(tokens)
    return 1


def causal_training(decoder: Decoder, tokens: Tensor) -> int:
    decoder.states(tokens, causal=True)
    return 1


@torch.inference_mode()
def cached(decoder: Decoder, tokens: Tensor) -> int:
    cache = build_cache(decoder.plan)
    for chunk in tokens.split([6, 1, 1], dim=1):
        decoder(chunk, cache=cache)
    return 3


WAYS = [forward, training, causal_training, cached]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "plan",
    [
        routed("expert", "share"),
        routed("token", "share"),
        routed("expert", "share", "cycle"),
        LOOPS["middle"].with_kv("share"),
        DepthPlan.build("sequence", 2, 8).with_kv("share"),
        DepthPlan.vanilla(8).with_kv("share", "middle-cycle", 3),
    ],
    ids=["expert", "token", "expert-cycle", "looped", "looped-sequence", "plain"],
)
def test_a_step_that_shares_projects_no_keys_and_values(plan: DepthPlan, way: Callable[[Decoder, Tensor], int]) -> None:
    decoder = decoder_of(plan)
    with counted(decoder) as calls:
        passes = way(decoder, some_tokens(3, 8))
    for layer in range(plan.unique_layers):
        makes = sum(not plan.reads_kv(step) for step in plan.uses(layer))
        assert calls[layer, "k"] == calls[layer, "v"] == passes * makes
        if way is not cached:  # there a recursion that no token goes to does not run at all
            assert calls[layer, "q"] == passes * len(plan.uses(layer))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_other_modes_project_at_every_step(way: Callable[[Decoder, Tensor], int]) -> None:
    """Otherwise the counts above would say little."""
    for kv in ("cache", "hybrid"):
        decoder = decoder_of(routed("token", kv))
        with counted(decoder) as calls:
            way(decoder, some_tokens(3, 8))
        for layer in (1, 2):
            assert calls[layer, "k"] == calls[layer, "v"] == calls[layer, "q"] > calls[0, "k"]


def test_without_sharing_nothing_is_handed_on() -> None:
    no_cache = NoCache(routed())
    assert {no_cache.at(step) for step in routed()} == {no_cache.reads(step) for step in routed()} == {None}


def test_shared_entries_are_those_of_the_first_use() -> None:
    plan = LOOPS["middle"].with_kv("share")
    no_cache = NoCache(plan)
    made = {}
    for step in plan:
        if step.part == "core" and step.recursion == 0:
            at = no_cache.at(step)
            assert isinstance(at, Kept)
            made[step.layer] = at.append(torch.randn(1, 2, 3, 6), torch.randn(1, 2, 3, 6))
        elif step.part == "core":
            assert no_cache.at(step) is None
            read = no_cache.reads(step)
            assert read is not None
            assert all(got is expected for got, expected in zip(read, made[step.layer], strict=True))


def test_hybrid_entries_are_ones_own_where_a_token_runs() -> None:
    plan = routed("expert", "hybrid")
    first, later = plan.recursion_steps(0)[0], plan.recursion_steps(2)[0]
    no_cache = NoCache(plan)
    k, v, own_k, own_v = torch.randn(4, 2, 2, 5, 6)
    kept = no_cache.at(first)
    assert kept is not None
    kept.append(k, v)
    at = torch.tensor([[1, 3], [0, 4]])
    active = torch.zeros(2, 5, dtype=torch.bool).scatter(1, at, True)
    where = at[:, None, :, None].expand(2, 2, 2, 6)
    gathered = no_cache.focus(at_BK=at).at(later)
    assert isinstance(gathered, Overwritten)
    got = gathered.append(own_k.gather(2, where), own_v.gather(2, where))
    whole = no_cache.focus(active_BT=active).at(later)
    assert isinstance(whole, Blended)
    for one, other, base, own in zip(got, whole.append(own_k, own_v), (k, v), (own_k, own_v), strict=True):
        assert torch.equal(one, other)
        for row in range(2):
            for slot in range(5):
                expected = own if active[row, slot] else base
                assert torch.equal(one[row, :, slot], expected[row, :, slot])
