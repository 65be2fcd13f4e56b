"""Attention of decoding rows over entries in pages.

Each row brings its own table of pages and its own number of entries. Nothing else tells rows apart: rows of different
sequences, of different recursions (their tables differ), or of one sequence while its prompt is read (the same table, one
entry more for each) share a call. Entry e of row n is in page table[n, e // page size], at e % page size.

On a GPU a program takes one row and one key-value head with all query heads that share it, and goes through its entries
once. Where rows are too few to fill the device, `splits` programs share the entries of each and the last to end combines
what they found. How many entries a row has is read on the device; programs beyond them end at once, so a recorded graph
over a wide table costs what its rows need.

Where a prompt is read, many rows look at the same entries: a program then takes a tile of rows that stand together
(`prefill_attention`).

Shapes: N rows, H query heads, G key-value heads, D head width, P pages of a table, E entries, S splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.kernels.row_blocks import SMS
from fathomlm.kernels.triton_here import early_launch, tl, triton

if triton is not None:
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

MAX_SPLITS, LEAST_ENTRIES = 32, 128
"""The most programs that share a row's entries, and the fewest entries worth a program."""

MANY_PROGRAMS = 8
"""Programs to a multiprocessor from which smaller ones are quicker."""
BITS = 64
"""Entries in front of a row that it may be told to see or not."""
TOGETHER = 128
"""Rows from which those of one sequence share a program."""


class AttentionBlocks(NamedTuple):
    entries: int
    """Entries of a row that a program takes at a time."""
    warps: int = 4
    stages: int = 3
    queries: int = 128
    """Queries that share a program where a prompt is read: heads of a group times rows."""


def attention_blocks(head_dim: int, size: int, programs: int = 0) -> AttentionBlocks:
    """Keys and values of a tile take about 32 KB: three tiles on their way leave room for two programs on a
    multiprocessor. Where programs are many, smaller ones are quicker, more of which run at once. In float32, where no tensor
    core helps, tiles are small enough for registers."""
    if size >= 4:
        return AttentionBlocks(16, warps=8 if head_dim > 64 else 4, stages=2)
    if head_dim <= 64 and programs >= MANY_PROGRAMS * SMS:
        return AttentionBlocks(32, warps=2, stages=4)
    return AttentionBlocks(max(16, min(128, 8192 // triton.next_power_of_2(head_dim))))


def choose_splits(rows: int, groups: int, longest: int, sms: int = SMS) -> int:
    """Programs to a row's entries: enough that rows and groups together give every multiprocessor a program, or two where
    rows may be long, but none with fewer than `LEAST_ENTRIES` of the `longest` row. Another kernel must combine what they
    find, which short rows are not worth."""
    each = 2 if longest > 8 * LEAST_ENTRIES else 1
    wanted = -(-each * sms // max(rows * groups, 1))
    return max(1, min(wanted, longest // LEAST_ENTRIES, MAX_SPLITS))


def workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Float32 numbers that `splits` programs of every row leave for the last of them."""
    return rows * heads * splits * (head_dim + 2) if splits > 1 else 0


def paged_attention(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, sequence_N: Tensor | None = None,
    arrived: Tensor | None = None, bias_DH: Tensor | None = None, bits_N: Tensor | None = None,
    starts_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v over each row's first `lengths_N` entries (N, H, D); zeros where it has none.

    `window` counts entries, so it is for models whose every token leaves an entry: a row sees the last `window` of its own.
    In its place `starts_N` (int32) says which entry is the first that each row sees, where entries are not positions.
    `workspace` is float32 of `workspace_size`, needed with `splits`, and so is `arrived`, an int32 for each row and group,
    all zero between calls (both are made on each call where they are not given). Pages in float8 hold keys / k_scale and
    values / v_scale. `sequence_N` says which rows have the same table, where those of a sequence stand together: then many
    rows are looked at together. `bits_N` (int64) says which of its last 64 entries a row sees, its own in the lowest bit:
    branches of a tree, one behind the other. Nothing outside `k_pages` and `v_pages` is read: a row whose table names a page
    that is not there is a bug, which raises on a CPU and gives NaN on a GPU.
    """
    if triton is not None and q_NHD.is_cuda and bias_DH is None:
        if sequence_N is not None and q_NHD.element_size() == 2 and len(q_NHD) >= TOGETHER and bits_N is None:
            return prefill_attention(
                q_NHD, k_pages, v_pages, table_NP, lengths_N, sequence_N, scale, window, k_scale, v_scale, out,
                starts_N=starts_N,
            )  # fmt: skip
        return _triton_paged_attention(
            q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, splits, workspace, k_scale, v_scale, out, arrived,
            bits_N=bits_N, starts_N=starts_N,
        )  # fmt: skip
    return plain_paged_attention(
        q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, k_scale=k_scale, v_scale=v_scale, out=out,
        bias_DH=bias_DH, bits_N=bits_N, starts_N=starts_N,
    )  # fmt: skip


def plain_paged_attention(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, bias_DH: Tensor | None = None,
    bits_N: Tensor | None = None, starts_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning. `splits` and `workspace` change nothing here."""
    (N, H, D), (size, G) = q_NHD.shape, k_pages.shape[1:3]
    if not lengths_N.is_cuda:  # where asking costs nothing, pages that no row needs are left alone
        table_NP = table_NP[:, : -(-int(lengths_N.max()) // size)]
    entry_E = torch.arange(table_NP.shape[1] * size, device=q_NHD.device)
    seen_NE = entry_E < lengths_N[:, None]
    if starts_N is not None:
        seen_NE = seen_NE & (entry_E >= starts_N[:, None])
    elif window is not None:
        seen_NE = seen_NE & (entry_E >= lengths_N[:, None] - window)
    if bits_N is not None:
        back_NE = (lengths_N[:, None] - 1 - entry_E).clamp_min(0)
        seen_NE = seen_NE & ((back_NE >= BITS) | (bits_N[:, None] >> back_NE.clamp_max(BITS - 1) & 1 != 0))
    table_NP = torch.where(seen_NE.view(*table_NP.shape, size).any(-1), table_NP, 0)  # what is unseen may be anything
    if not table_NP.is_cuda and table_NP.numel():  # torch would take a negative number for one from the end
        assert int(table_NP.min()) >= 0, f"a row looks at page {int(table_NP.min())}"
        assert int(lengths_N.max()) <= entry_E.numel(), "a row has more entries than its table has room for"
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    k, v = (
        torch.where(seen_NE[..., None, None], pages[table_NP.long()].flatten(1, 2).to(wide) * by, 0.0)
        for pages, by in ((k_pages, k_scale), (v_pages, v_scale))
    )
    scores = torch.einsum("ngrd,negd->ngre", q_NHD.view(N, G, H // G, D).to(wide), k) * scale
    if bias_DH is not None:
        back_NE = (lengths_N[:, None] - 1 - entry_E).clamp(0, len(bias_DH) - 1)
        scores = scores + bias_DH[back_NE].to(q_NHD.dtype).transpose(1, 2).reshape(N, G, H // G, -1)
    weights = scores.masked_fill(~seen_NE[:, None, None], -math.inf).softmax(-1).nan_to_num(0.0)
    mixed = torch.einsum("ngre,negd->ngrd", weights, v).reshape(N, H, D).to(q_NHD.dtype)
    return mixed if out is None else out.copy_(mixed)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _first_seen(length, starts_ptr, row, asks, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first entry that rows see. WINDOW: how many they do, 0 for all; -1 where `starts_ptr` says it."""
        low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
        if WINDOW < 0:
            low = tl.load(starts_ptr + row, mask=asks, other=0).to(tl.int32)
        return low

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _shares(length, low, BLOCK: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first entry that a row's programs look at, and how many each takes: whole tiles, as even as can be."""
        first = low // BLOCK * BLOCK
        tiles = (length - first + BLOCK - 1) // BLOCK
        return first, (tiles + SPLITS - 1) // SPLITS * BLOCK

    @triton.jit(do_not_specialize=["pages", "columns"])  # type: ignore[untyped-decorator,unused-ignore]
    def _attention_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, bits_ptr, starts_ptr, out_ptr, partial_ptr,
        extent_ptr, arrived_ptr, score_scale, v_scale, H, G, pages, columns,
        D: tl.constexpr, WIDE: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
        BITS: tl.constexpr,
    ):  # fmt: skip
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        length = tl.load(lengths_ptr + row).to(tl.int32)
        low = _first_seen(length, starts_ptr, row, True, WINDOW)
        first, share = _shares(length, low, BLOCK, SPLITS)
        start = first + part * share
        end = tl.minimum(start + share, length)
        if part > 0 and start >= end:
            return
        head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
        whole: tl.constexpr = WIDE == D
        here = head < PER_GROUP
        if not whole:
            here = here & (column < D)
        q = tl.load(q_ptr + row * q_stride + (group * PER_GROUP + head) * D + column, mask=here, other=0.0)
        table_ptr += row * table_stride
        most = tl.full((HEADS,), -1e30 if BITS else float("-inf"), tl.float32)  # with bits a tile may be unseen altogether
        bits = tl.load(bits_ptr + row) if BITS else 0
        weight = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, WIDE), tl.float32)
        last, outside = (pages - 1).to(tl.uint32), tl.zeros((BLOCK,), tl.int32)
        for at in range(start, end, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            seen = entry < end
            if WINDOW != 0:
                seen = seen & (entry >= low)
            if BITS:
                back = length - 1 - entry
                bit = (bits >> tl.minimum(tl.maximum(back, 0), BITS - 1).to(tl.int64)) & 1
                seen = seen & ((back >= BITS) | (bit != 0))
            page = tl.load(table_ptr + tl.minimum(entry // PAGE, columns - 1), mask=seen, other=0).to(
                tl.uint32, bitcast=True
            )
            outside = tl.maximum(outside, (page > last).to(tl.int32))
            page = tl.minimum(page, last).to(tl.int64)  # a mask that waits for the page would keep loads from overlapping
            place = ((page * PAGE + entry % PAGE) * G + group)[:, None] * D + column
            there = seen[:, None] if whole else seen[:, None] & (column < D)
            k = tl.load(k_ptr + place, mask=there, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + place, mask=there, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))  # never -inf: every tile has an entry that is seen
            shrink = tl.exp2(most - higher)
            p = tl.exp2(scores - higher[:, None])
            weight = weight * shrink + tl.sum(p, 1)
            mixed = tl.dot(p.to(q.dtype), v, mixed * shrink[:, None], input_precision="ieee")
            most = higher
        if (tl.max(outside, 0) > 0) | (length > columns * PAGE):
            mixed += float("nan")
        at_head = row * H + group * PER_GROUP + head
        if SPLITS == 1:
            mixed = mixed * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            tl.store(out_ptr + at_head * D + column, mixed.to(out_ptr.dtype.element_ty), mask=here)
        else:
            at_part = at_head * SPLITS + part
            tl.store(partial_ptr + at_part * D + column, mixed, mask=here)
            tl.store(extent_ptr + 2 * at_part, most[:, None], mask=head < PER_GROUP)
            tl.store(extent_ptr + 2 * at_part + 1, weight[:, None], mask=head < PER_GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
            working = tl.maximum((length - first + share - 1) // tl.maximum(share, 1), 1)
            arrived_ptr += row * G + group
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == working - 1:  # the last puts together what all have found
                tl.store(arrived_ptr, 0)
                every = tl.arange(0, PARTS)[None, :]
                there = (head < PER_GROUP) & (every < working)
                at_every = extent_ptr + 2 * (at_head * SPLITS + every)
                mosts = tl.load(at_every, mask=there, other=float("-inf"), cache_modifier=".cg")
                weights = tl.load(at_every + 1, mask=there, other=0.0, cache_modifier=".cg")
                most = tl.max(tl.where((length > 0) & (head < PER_GROUP), mosts, 0.0), 1)
                weight = tl.sum(weights * tl.exp2(mosts - most[:, None]), 1)
                mixed = tl.zeros((HEADS, WIDE), tl.float32)
                for one in range(working):
                    at_one = at_head * SPLITS + one
                    other = tl.load(extent_ptr + 2 * at_one, mask=head < PER_GROUP, other=0.0, cache_modifier=".cg")
                    found = tl.load(partial_ptr + at_one * D + column, mask=here, other=0.0, cache_modifier=".cg")
                    mixed += found * tl.exp2(other - most[:, None])
                mixed = mixed * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
                tl.store(out_ptr + at_head * D + column, mixed.to(out_ptr.dtype.element_ty), mask=here)

    def _triton_paged_attention(
        q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
        window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
        k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, arrived: Tensor | None = None,
        blocks: AttentionBlocks | None = None, bits_N: Tensor | None = None, starts_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        assert all(each is None or each.is_contiguous() for each in (bits_N, starts_N))
        out = torch.empty_like(q_NHD, memory_format=torch.contiguous_format) if out is None else out
        size = workspace_size(N, H, D, splits)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=q_NHD.device)
        if arrived is None:
            arrived = torch.zeros(N * G if splits > 1 else 0, dtype=torch.int32, device=q_NHD.device)
        assert workspace.numel() >= size, "the workspace is for fewer rows, heads or splits"
        assert splits == 1 or arrived.numel() >= N * G, "the counts are for fewer rows or groups"
        assert all(t.is_contiguous() for t in (k_pages, v_pages, lengths_N, out, workspace, q_NHD[0]))
        assert table_NP.stride(1) == 1 or table_NP.shape[1] == 1
        b = blocks or attention_blocks(D, q_NHD.element_size(), N * G * splits)
        wide, extent = max(16, triton.next_power_of_2(D)), workspace[N * H * splits * D :]
        _attention_kernel[(N, G, splits)](
            q_NHD, q_NHD.stride(0), k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N,
            lengths_N if bits_N is None else bits_N, lengths_N if starts_N is None else starts_N, out, workspace, extent,
            arrived, scale * k_scale * math.log2(math.e), v_scale, H, G, len(k_pages), table_NP.shape[1], D=D, WIDE=wide,
            PER_GROUP=H // G, HEADS=max(16, triton.next_power_of_2(H // G)), PAGE=page, BLOCK=b.entries,
            WINDOW=(window or 0) if starts_N is None else -1, SPLITS=splits, PARTS=triton.next_power_of_2(splits),
            BITS=0 if bits_N is None else BITS,
            num_warps=b.warps, num_stages=b.stages, **early_launch(N),
        )  # fmt: skip
        return out

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _entries(  # type: ignore[no-untyped-def]
        k_ptr, v_ptr, table_ptr, at, end, pages, columns, G, group,
        D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTLY: tl.constexpr,
    ):  # fmt: skip
        """BLOCK keys and values from `at` on, and whether each is in a page that is not there. PARTLY: some may be none."""
        entry, column = at + tl.arange(0, BLOCK), tl.arange(0, WIDE)[None, :]
        last = (pages - 1).to(tl.uint32)
        there = entry < end
        if PARTLY:
            page = tl.load(table_ptr + tl.minimum(entry // PAGE, columns - 1), mask=there, other=0)
        else:
            page = tl.load(table_ptr + tl.minimum(entry // PAGE, columns - 1))
        page = page.to(tl.uint32, bitcast=True)
        bad = (page > last).to(tl.int32)
        page = tl.minimum(page, last).to(tl.int64)
        place = ((page * PAGE + entry % PAGE) * G + group)[:, None] * D + column
        inside = column < D
        if PARTLY:
            inside = there[:, None] & inside
        if PARTLY or WIDE != D:
            return tl.load(k_ptr + place, mask=inside, other=0.0), tl.load(v_ptr + place, mask=inside, other=0.0), bad
        return tl.load(k_ptr + place), tl.load(v_ptr + place), bad

    @triton.jit(do_not_specialize=["rows", "pages", "columns"])  # type: ignore[untyped-decorator,unused-ignore]
    def _prefill_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, starts_ptr, sequence_ptr, out_ptr,
        score_scale, v_scale, rows, H, G, pages, columns,
        D: tl.constexpr, WIDE: tl.constexpr, PER_GROUP: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        tall: tl.constexpr = QUERIES // PER_GROUP
        group, first_row = tl.program_id(1), tl.program_id(0) * tall
        last_row = tl.minimum(first_row + tall, rows)
        query, column = tl.arange(0, QUERIES), tl.arange(0, WIDE)[None, :]
        row = first_row + query // PER_GROUP
        asks = row < last_row
        row = tl.minimum(row, rows - 1).to(tl.int64)
        at_head = (row * q_stride + (group * PER_GROUP + query % PER_GROUP) * D)[:, None] + column
        here = asks[:, None] & (column < D)
        q = tl.load(q_ptr + at_head, mask=here, other=0.0)
        length = tl.load(lengths_ptr + row, mask=asks, other=0).to(tl.int32)
        low = _first_seen(length, starts_ptr, row, asks, WINDOW)
        sequence = tl.load(sequence_ptr + row, mask=asks, other=-1)
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, WIDE), tl.float32)
        wrong = length > columns * PAGE
        start = first_row
        while start < last_row:  # one sequence after the other
            mine = asks & (sequence == tl.load(sequence_ptr + start))
            end = tl.max(tl.where(mine, length, 0), 0)
            least = tl.min(tl.where(mine, length, end), 0)
            row_table = table_ptr + start.to(tl.int64) * table_stride
            begin = 0 * least
            alone = tl.load(sequence_ptr + start) == tl.load(sequence_ptr + last_row - 1)
            if WINDOW != 0:
                begin = tl.min(tl.where(mine, low, end), 0) // BLOCK * BLOCK
            elif alone & (start == first_row):
                begin = least // BLOCK * BLOCK  # what all rows of the tile see needs no mask
                outside = tl.zeros((BLOCK,), tl.int32)
                for at in range(0, begin, BLOCK):
                    k, v, bad = _entries(
                        k_ptr, v_ptr, row_table, at, end, pages, columns, G, group, D, WIDE, PAGE, BLOCK, False
                    )  # fmt: skip
                    outside = tl.maximum(outside, bad)
                    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
                    higher = tl.maximum(most, tl.max(scores, 1))
                    shrink = tl.exp2(most - higher)
                    p = tl.exp2(scores - higher[:, None])
                    weight = weight * shrink + tl.sum(p, 1)
                    mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision="ieee")
                    most = higher
                wrong = wrong | (tl.max(outside, 0) > 0)
            for at in range(begin, end, BLOCK):
                k, v, bad = _entries(
                    k_ptr, v_ptr, row_table, at, end, pages, columns, G, group, D, WIDE, PAGE, BLOCK, True
                )  # fmt: skip
                entry = at + tl.arange(0, BLOCK)
                sees = mine[:, None] & (entry[None, :] < length[:, None])
                if WINDOW != 0:
                    sees = sees & (entry[None, :] >= low[:, None])
                wrong = wrong | (mine & (tl.max(bad, 0) > 0))
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
                scores = tl.where(sees, scores, float("-inf"))
                higher = tl.maximum(most, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
                shrink = tl.exp2(most - base)
                p = tl.exp2(scores - base[:, None])
                weight = weight * shrink + tl.sum(p, 1)
                mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision="ieee")
                most = higher
            start = tl.max(tl.where(mine, row.to(tl.int32), 0), 0) + 1
        mixed = mixed / tl.where(weight > 0, weight, 1.0)[:, None] * v_scale
        mixed = tl.where(wrong[:, None], float("nan"), mixed)
        out_at = ((row * H + group * PER_GROUP + query % PER_GROUP) * D)[:, None] + column
        tl.store(out_ptr + out_at, mixed.to(out_ptr.dtype.element_ty), mask=here)

    def prefill_attention(
        q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, sequence_N: Tensor,
        scale: float, window: int | None = None, k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None,
        blocks: AttentionBlocks | None = None, starts_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`paged_attention` where rows of a sequence stand together: each tile reads its entries once for all its rows. A
        tile that holds several sequences goes through them one by one."""
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        out = torch.empty_like(q_NHD, memory_format=torch.contiguous_format) if out is None else out
        assert all(t.is_contiguous() for t in (k_pages, v_pages, lengths_N, sequence_N, out, q_NHD[0]))
        assert starts_N is None or starts_N.is_contiguous()
        assert table_NP.stride(1) == 1 or table_NP.shape[1] == 1
        b = blocks or AttentionBlocks(64, warps=8 if D > 64 else 4, queries=128)
        queries = max(b.queries, triton.next_power_of_2(H // G))
        grid = (triton.cdiv(N, queries // (H // G)), G)
        _prefill_kernel[grid](
            q_NHD, q_NHD.stride(0), k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N,
            lengths_N if starts_N is None else starts_N, sequence_N, out,
            scale * k_scale * math.log2(math.e), v_scale, N, H, G, len(k_pages), table_NP.shape[1], D=D,
            WIDE=max(16, triton.next_power_of_2(D)), PER_GROUP=H // G, QUERIES=queries, PAGE=page, BLOCK=b.entries,
            WINDOW=(window or 0) if starts_N is None else -1, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out
