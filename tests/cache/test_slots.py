"""The slot cache: entries of some tokens of some rows, each step at its own length."""

from __future__ import annotations

import pytest
import torch

from fathomlm.cache import Focus, SlotCache, Span
from fathomlm.depth import DepthPlan

G, D = 2, 3
PLAN = DepthPlan.vanilla(2)
CPU = torch.device("cpu")


def new_entries(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, G, tokens, D)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def store(cache: SlotCache, step: int, spans: list[Span], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append at one step; returns what went in."""
    k, v = new_entries(len(spans), max(span.count for span in spans), seed)
    cache.focus(Focus(spans, CPU))
    kv = cache.at(PLAN.steps[step])
    assert kv is not None
    seen_k, seen_v = kv.append(k, v)
    for r, span in enumerate(spans):
        assert torch.equal(seen_k[r, :, span.first : span.end], k[r, :, : span.count])
        assert torch.equal(seen_v[r, :, span.first : span.end], v[r, :, : span.count])
    return k, v


def test_a_focus_pads_short_spans_with_their_last_token() -> None:
    focus = Focus([Span(2, 4, 3), Span(0, 1, 1)], CPU)
    assert focus.slots_RN.tolist() == [[4, 5, 6], [1, 1, 1]]
    assert (focus.reach, focus.rows_R.tolist(), focus.slot.tolist()) == (7, [2, 0], [4, 5, 6, 1])


def test_rows_and_steps_fill_at_their_own_speed() -> None:
    cache = SlotCache(PLAN, rows=3, reserve=2)
    first, _ = store(cache, 0, [Span(0, 0, 2), Span(1, 0, 4), Span(2, 0, 1)], seed=1)
    store(cache, 1, [Span(1, 0, 3)], seed=2)
    later, _ = store(cache, 0, [Span(2, 1, 3), Span(0, 2, 1)], seed=3)
    assert [cache.held(PLAN.steps[0], row) for row in range(3)] == [3, 4, 4]
    assert [cache.held(PLAN.steps[1], row) for row in range(3)] == [0, 3, 0]
    assert cache.length == 0
    keys, values = cache.entries(PLAN.steps[0], 2)
    assert keys.shape == values.shape == (G, 4, D)
    assert torch.equal(keys, torch.cat((first[2, :, :1], later[0]), dim=1))
    assert torch.equal(cache.entries(PLAN.steps[0], 0)[0], torch.cat((first[0, :, :2], later[1, :, :1]), dim=1))
    assert cache.bytes() == (3 + 4 + 4 + 3) * 2 * G * D * 4


def test_truncation_of_one_row_and_of_all() -> None:
    cache = SlotCache(PLAN, rows=2)
    for step in range(2):
        store(cache, step, [Span(0, 0, 5), Span(1, 0, 5)], seed=step)
    cache.truncate(3, row=1)
    assert (cache.held(PLAN.steps[0], 0), cache.held(PLAN.steps[0], 1), cache.length) == (5, 3, 3)
    after, _ = store(cache, 0, [Span(1, 3, 1)], seed=9)
    assert torch.equal(cache.entries(PLAN.steps[0], 1)[0][:, 3:], after[0])
    cache.truncate(2)
    assert cache.length == 2
    cache.truncate(4)
    assert cache.length == 2


def test_a_gap_is_a_bug() -> None:
    cache = SlotCache(PLAN, rows=1)
    with pytest.raises(AssertionError, match="behind those that the row has"):
        store(cache, 0, [Span(0, 1, 1)], seed=0)


def test_room_that_nobody_filled_is_a_number() -> None:
    """Attention multiplies what it hides by zero, so what is there must be finite."""
    cache = SlotCache(PLAN, rows=2, reserve=8)
    cache.focus(Focus([Span(0, 0, 6)], CPU))
    kv = cache.at(PLAN.steps[0])
    assert kv is not None
    kv.append(*new_entries(1, 6))
    cache.focus(Focus([Span(0, 6, 1), Span(1, 0, 1)], CPU))
    k, v = kv.append(*new_entries(2, 1))
    assert k.shape == v.shape == (2, G, 7, D)
    assert not k[1, :, 1:].any()


def test_shared_entries_and_fewer_steps() -> None:
    plan = DepthPlan.build("cycle", 2, 4).with_kv("share")
    cache = SlotCache(plan, rows=2)
    assert cache.at(plan.steps[2]) is None
    assert cache.reads(plan.steps[0]) is None
    kv = cache.at(plan.steps[0])
    assert kv is not None
    cache.focus(Focus([Span(0, 0, 2), Span(1, 0, 2)], CPU))
    k, _ = new_entries(2, 2)
    kv.append(k, k)
    cache.focus(Focus([Span(1, 0, 2)], CPU))
    read = cache.reads(plan.steps[2])
    assert read is not None
    assert torch.equal(read[0], k[1:])
    shallow = SlotCache(PLAN, rows=1, steps=PLAN.steps[:1])
    store(shallow, 0, [Span(0, 0, 3)], seed=0)
    assert shallow.length == 3
    assert shallow.at(PLAN.steps[1]) is None
