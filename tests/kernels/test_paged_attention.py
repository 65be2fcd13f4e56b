"""Attention over pages against a loop over rows and heads in float64; pages lie in no order, with NaN around the entries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fathomlm.kernels import attention_blocks as module
from fathomlm.kernels.attention_blocks import PrefixSpan, choose_splits, workspace_size
from fathomlm.kernels.gathered_attention import GatheredPages
from fathomlm.kernels.paged_attention import paged_attention, plain_paged_attention
from fathomlm.kernels.paged_write import FLOAT8
from kernels.row_cases import Pages, randoms

PAGE = 4
LENGTHS = [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 4 * PAGE + 1, 13]


def one_row(q_HD: Tensor, pages: Pages, row: int, scale: float, window: int | None) -> Tensor:
    """Entry by entry, head by head."""
    length, (H, D), G = int(pages.lengths[row]), q_HD.shape, pages.k.shape[2]
    first = 0 if window is None else max(0, length - window)
    out = torch.zeros(H, D, dtype=q_HD.dtype)
    at = [(int(pages.table[row, e // PAGE]), e % PAGE) for e in range(first, length)]
    for head in range(H if at else 0):
        group = head // (H // G)
        keys, values = (torch.stack([t[page, place, group] for page, place in at]) for t in (pages.k, pages.v))
        scores = [math.exp(float(q_HD[head] @ key) * scale) for key in keys]
        out[head] = sum(score * value for score, value in zip(scores, values, strict=True)) / sum(scores)
    return out


@pytest.mark.parametrize(("heads", "groups"), [(6, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_rows_see_their_own_entries(heads: int, groups: int, window: int | None) -> None:
    random = randoms(dtype=torch.float64)
    q, pages = random(len(LENGTHS), heads, 5), Pages.build(random, LENGTHS, groups, 5, PAGE)
    found = paged_attention(q, *pages, 0.4, window=window)
    wanted = torch.stack([one_row(q[row], pages, row, 0.4, window) for row in range(len(LENGTHS))])
    torch.testing.assert_close(found, wanted)
    assert not found[0].any()


def test_rows_see_from_a_start_of_their_own() -> None:
    random = randoms(dtype=torch.float64)
    q, pages = random(len(LENGTHS), 6, 5), Pages.build(random, LENGTHS, 2, 5, PAGE)
    starts = torch.tensor([length // (1 + row % 3) - 1 for row, length in enumerate(LENGTHS)]).clamp_min(0).int()
    found = paged_attention(q, *pages, 0.4, window=1, starts_N=starts)
    windows = (pages.lengths - starts).tolist()
    assert len(set(windows)) > 3
    wanted = torch.stack([one_row(q[row], pages, row, 0.4, windows[row]) for row in range(len(LENGTHS))])
    torch.testing.assert_close(found, wanted)


PREFIXES = [(0, 4), (1, 4), (3, 8)]


@pytest.mark.parametrize(("first", "end"), PREFIXES)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_a_prefix_is_seen_wherever_a_window_begins(first: int, end: int, window: int | None) -> None:
    """As if what is between them were not there."""
    random = randoms(dtype=torch.float64)
    lengths = [0, *range(end + 1, end + 20, 3)]
    q, pages = random(len(lengths), 4, 5), Pages.build(random, lengths, 2, 5, PAGE)
    bias_DH = random(7, 4)
    found = paged_attention(q, *pages, 0.4, window=window, prefix=PrefixSpan(first, end))
    biased = paged_attention(q, *pages, 0.4, window=window, bias_DH=bias_DH, prefix=PrefixSpan(first, end))
    for row, length in enumerate(lengths[1:], 1):
        seen = [e for e in range(first, length) if e < end or window is None or e >= length - window]
        at = torch.tensor([[int(pages.table[row, e // PAGE]), e % PAGE] for e in seen])
        k, v = (t[at[:, 0], at[:, 1]].transpose(0, 1).repeat_interleave(2, dim=0) for t in (pages.k, pages.v))
        scores = torch.einsum("hd,hed->he", q[row], k) * 0.4
        torch.testing.assert_close(found[row], torch.einsum("he,hed->hd", scores.softmax(-1), v))
        none = torch.zeros(4, dtype=torch.float64)
        gains = torch.stack([none if e < end else bias_DH[min(length - 1 - e, 6)] for e in seen], dim=1)
        torch.testing.assert_close(biased[row], torch.einsum("he,hed->hd", (scores + gains).softmax(-1), v))
    assert not found[0].any()


def test_rows_see_only_the_entries_that_their_bits_name() -> None:
    """Of the last 64; all before those."""
    random = randoms(dtype=torch.float64)
    lengths = [0, 1, 9, 64, 65, 70]
    q, pages = random(len(lengths), 4, 5), Pages.build(random, lengths, 2, 5, PAGE)
    bits = torch.tensor([0, 1, 0b100100101, -(2**63) | 1, 1, 0b1011])
    found = paged_attention(q, *pages, 0.4, bits_N=bits)
    for row, length in enumerate(lengths):
        seen = [e for e in range(length) if length - 1 - e >= 64 or int(bits[row]) >> (length - 1 - e) & 1]
        at = torch.tensor([[int(pages.table[row, e // PAGE]), e % PAGE] for e in seen], dtype=torch.long).view(-1, 2)
        k, v = (t[at[:, 0], at[:, 1]].transpose(0, 1).repeat_interleave(2, dim=0) for t in (pages.k, pages.v))
        weights = (torch.einsum("hd,hed->he", q[row], k) * 0.4).softmax(-1)
        torch.testing.assert_close(found[row], torch.einsum("he,hed->hd", weights, v))


def test_one_row_without_entries() -> None:
    random = randoms()
    pages = Pages.build(random, [0], 1, 4, PAGE)
    assert torch.equal(paged_attention(random(1, 2, 4), *pages, 1.0), torch.zeros(1, 2, 4))


def test_rows_of_one_sequence_are_causal_attention() -> None:
    """While a prompt is read, its rows bring the same table and one entry more each."""
    random = randoms(dtype=torch.float64)
    pages = Pages.build(random, [11], 2, 8, PAGE)
    q = random(11, 4, 8)
    together = Pages(pages.k, pages.v, pages.table.expand(11, -1), torch.arange(1, 12, dtype=torch.int32))
    at = torch.tensor([[int(pages.table[0, e // PAGE]), e % PAGE] for e in range(11)])
    k, v = (t[at[:, 0], at[:, 1]].transpose(0, 1).repeat_interleave(2, dim=0) for t in (pages.k, pages.v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True, scale=0.4)
    torch.testing.assert_close(paged_attention(q, *together, 0.4), wanted.transpose(0, 1))


def test_where_pages_lie_changes_nothing() -> None:
    random = randoms()
    q, pages = random(3, 4, 8), Pages.build(random, [9, 4, 17], 2, 8, PAGE)
    order = torch.randperm(pages.k.shape[0], generator=torch.Generator().manual_seed(9))
    known = pages.table < pages.k.shape[0]
    table = torch.where(known, order.argsort().int()[pages.table.where(known, 0).long()], pages.table).int()
    moved = Pages(pages.k[order], pages.v[order], table, pages.lengths)
    assert torch.equal(paged_attention(q, *pages, 0.5), paged_attention(q, *moved, 0.5))


def test_float8_pages_and_a_given_output() -> None:
    random = randoms()
    q, pages = random(2, 4, 8), Pages.build(random, [7, 12], 2, 8, PAGE)
    k, v = pages.k.nan_to_num().to(FLOAT8), pages.v.nan_to_num().to(FLOAT8)
    out = torch.full_like(q, torch.nan)
    found = paged_attention(q, k, v, pages.table, pages.lengths, 0.5, k_scale=0.25, v_scale=3.0, out=out)
    assert found is out
    wide = paged_attention(q, k.float() * 0.25, v.float() * 3.0, pages.table, pages.lengths, 0.5)
    torch.testing.assert_close(out, wide)


@pytest.mark.parametrize("rows", [1, 3, 32, 64, 512])
@pytest.mark.parametrize("groups", [1, 5, 32])
@pytest.mark.parametrize("longest", [1, 127, 128, 2048, 8192, 131072])
def test_splits(rows: int, groups: int, longest: int) -> None:
    splits = choose_splits(rows, groups, longest, sms=132)
    assert 1 <= splits <= module.MAX_SPLITS
    assert splits == 1 or longest // splits >= module.LEAST_ENTRIES
    assert splits == 1 or rows * groups * (splits - 1) < 2 * 132
    assert splits == module.MAX_SPLITS or longest < 2 * 128 * splits or rows * groups * splits >= 2 * 132


@pytest.mark.parametrize(("groups", "splits"), [(1, 9), (3, 3), (5, 2), (8, 2), (9, 1), (32, 1)])
def test_long_contexts_of_a_usual_batch_give_every_multiprocessor_two_programs(groups: int, splits: int) -> None:
    """32 rows of 8,192 tokens: SmolLM2-360M has 5 groups, the 1.7B model 32."""
    assert choose_splits(32, groups, 8192, sms=132) == splits
    assert 32 * groups * splits >= 2 * 132


def test_sizes_of_workspaces() -> None:
    assert workspace_size(3, 15, 64, 1) == 0
    assert workspace_size(3, 15, 64, 4) == 3 * 15 * 4 * 66


def test_a_bias_by_distance() -> None:
    """T5's positions: what a score gains depends on how far back a key is; the farthest number is for all beyond it."""
    random = randoms(dtype=torch.float64)
    lengths = LENGTHS[1:]
    q, pages, bias_DH = random(len(lengths), 4, 5), Pages.build(random, lengths, 2, 5, PAGE), random(7, 4)
    found = paged_attention(q, *pages, 1.0, bias_DH=bias_DH)
    back_NE = torch.randint(0, 9, (len(lengths), pages.table.shape[1] * PAGE), generator=torch.Generator().manual_seed(1))
    told = paged_attention(q, *pages, 1.0, bias_DH=bias_DH, back_NE=back_NE)
    for row, length in enumerate(lengths):
        at = torch.tensor([[int(pages.table[row, e // PAGE]), e % PAGE] for e in range(length)])
        k, v = (t[at[:, 0], at[:, 1]].transpose(0, 1).repeat_interleave(2, dim=0) for t in (pages.k, pages.v))
        for said, back in ((found, [length - 1 - e for e in range(length)]), (told, back_NE[row, :length].tolist())):
            gains = torch.stack([bias_DH[min(one, 6)] for one in back], dim=1)
            scores = torch.einsum("hd,hed->he", q[row], k) + gains
            torch.testing.assert_close(said[row], torch.einsum("he,hed->hd", scores.softmax(-1), v))


@pytest.mark.parametrize("lengths", [[7], [1], [5, 5], [1, 4, 13, 9]])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_gathered_pages(lengths: list[int], window: int | None, biased: bool, beside: bool) -> None:
    """On a CPU: what the plain version says, for rows of their own and of one sequence, with NaN around."""
    random = randoms()
    heads, groups = (2, 2) if biased else (6, 2)
    pages = Pages.build(random, lengths, groups, 8, PAGE)
    k, v, table = pages.k, pages.v, pages.table
    if beside:  # the pages of each row in order
        order = torch.cat([table[row, : -(-length // PAGE)] for row, length in enumerate(lengths)]).long()
        k, v = k[order], v[order]
        starts = torch.tensor([sum(-(-length // PAGE) for length in lengths[:row]) for row in range(len(lengths))])
        table = (starts[:, None] + torch.arange(table.shape[1])).int()
    bias_DH = random(7, heads) if biased else None
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    ranks = torch.tensor([entry + 1 for length in lengths for entry in range(length)], dtype=torch.int32)
    for q, seen, counts, sequence in (
        (random(len(lengths), heads, 8), table, pages.lengths, None),
        (random(len(rows), heads, 8), table[rows], ranks, rows),
    ):
        q_NH1D = q[:, :, None]
        found = GatheredPages(seen, counts.tolist(), PAGE, sequence).attend(q_NH1D, k, v, 0.4, window, bias_DH)
        wanted = plain_paged_attention(q, k, v, seen, counts, 0.4, window, bias_DH=bias_DH)
        torch.testing.assert_close(found[:, :, 0], wanted)
        gathered = GatheredPages(seen, counts.tolist(), PAGE, sequence)
        for share in (0.3, 0.8):  # each row from an entry of its own on
            starts = (counts * torch.linspace(0, share, len(counts))).int()
            found = gathered.attend(q_NH1D, k, v, 0.4, window, bias_DH, starts)
            wanted = plain_paged_attention(q, k, v, seen, counts, 0.4, bias_DH=bias_DH, starts_N=starts)
            torch.testing.assert_close(found[:, :, 0], wanted)


@pytest.mark.parametrize(("first", "end"), PREFIXES)
@pytest.mark.parametrize("lengths", [[21], [9, 10, 30]])
@pytest.mark.parametrize("biased", [False, True])
def test_gathered_pages_behind_a_prefix(first: int, end: int, lengths: list[int], biased: bool) -> None:
    random, prefix = randoms(), PrefixSpan(first, end)
    pages = Pages.build(random, lengths, 2, 8, PAGE)
    bias_DH = random(7, 2) if biased else None
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length - end)])
    ranks = torch.tensor([entry + 1 for length in lengths for entry in range(end, length)], dtype=torch.int32)
    for q, seen, counts, sequence in (
        (random(len(lengths), 2, 8), pages.table, pages.lengths, None),
        (random(len(rows), 2, 8), pages.table[rows], ranks, rows),
    ):
        gathered = GatheredPages(seen, counts.tolist(), PAGE, sequence, prefix=prefix)
        starts = (end + (counts - end) * torch.linspace(0, 0.9, len(counts))).int()
        for window, own in ((None, None), (1, None), (4, None), (11, None), (None, starts)):
            found = gathered.attend(q[:, :, None], pages.k, pages.v, 0.4, window, bias_DH, own)
            wanted = plain_paged_attention(
                q, pages.k, pages.v, seen, counts, 0.4, window, bias_DH=bias_DH, starts_N=own, prefix=prefix
            )
            torch.testing.assert_close(found[:, :, 0], wanted)


def test_a_row_that_sees_no_number_spoils_no_other() -> None:
    random = randoms()
    pages = Pages.build(random, [5, 9], 2, 8, PAGE)
    pages.k[int(pages.table[0, 0]), 2] = torch.nan
    found = GatheredPages(pages.table, [5, 9], PAGE).attend(random(2, 4, 1, 8), pages.k, pages.v, 0.4, None, None)
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())
