"""The kernel behind `paged_attention`: one row and one key-value head a program, with all query heads that share it.

Numbers of pages must be known before entries can be loaded. With `ahead` those of the next tile are loaded while this one's
entries are, so that the compiler keeps several tiles of entries on their way; otherwise each tile waits for its numbers.

Shapes: N rows, H query heads, G key-value heads, D head width, P pages of a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import NO_PREFIX, AttentionBlocks, PrefixSpan, attention_blocks, workspace_size
from fathomlm.kernels.triton_here import early_launch, tl, triton

BITS = 64
"""Entries in front of a row that it may be told to see or not."""


if triton is not None:
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def row_inverse_rms(x_ptr, at, eps, DEPTH: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        """1 / rms of one row. Every program of a row finds it anew: the row is in the cache, and a kernel of its own would
        cost more."""
        column = tl.arange(0, WIDE)
        x = tl.load(x_ptr + at + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, 0) / DEPTH + eps)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def first_seen(length, starts_ptr, row, asks, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first entry that rows see. WINDOW: how many they do, 0 for all; -1 where `starts_ptr` says it."""
        low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
        if WINDOW < 0:
            low = tl.load(starts_ptr + row, mask=asks, other=0).to(tl.int32)
        return low

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _shares(low, end, BLOCK: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first entry that a row's programs look at, and how many of those before `end` each takes: whole tiles, as even
        as can be, and one at least."""
        first = low // BLOCK * BLOCK
        tiles = (tl.maximum(end - first, 0) + BLOCK - 1) // BLOCK
        return first, tl.maximum((tiles + SPLITS - 1) // SPLITS, 1) * BLOCK

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def page_numbers(table_ptr, entry, columns, PAGE: tl.constexpr, seen=None):  # type: ignore[no-untyped-def]
        """The pages of some entries, also of those behind a row's last: any number, none of which is negative. 0 for those
        that are not `seen`, where that is given."""
        at = table_ptr + tl.minimum(entry // PAGE, columns - 1)
        page = tl.load(at) if seen is None else tl.load(at, mask=seen, other=0)
        return page.to(tl.uint32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def any_outside(table_ptr, start, end, last, columns, PAGE: tl.constexpr, MANY: tl.constexpr):  # type: ignore[no-untyped-def]
        """Whether entries are in pages that are not there. Asked last: what loads entries must not wait for it."""
        outside = tl.zeros((MANY,), tl.int32)
        upto = tl.minimum((end + PAGE - 1) // PAGE, columns)
        for at in range(start // PAGE, upto, MANY):
            column = at + tl.arange(0, MANY)
            page = tl.load(table_ptr + column, mask=column < upto, other=0).to(tl.uint32, bitcast=True)
            outside = tl.maximum(outside, (page > last).to(tl.int32))
        return tl.max(outside, 0) > 0

    @triton.jit(do_not_specialize=["pages", "columns"])  # type: ignore[untyped-decorator,unused-ignore]
    def _attention_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, bits_ptr, starts_ptr, bias_ptr, out_ptr,
        partial_ptr, extent_ptr, arrived_ptr, score_scale, v_scale, H, G, pages, columns,
        D: tl.constexpr, WIDE: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
        BITS: tl.constexpr, AHEAD: tl.constexpr, BESIDE: tl.constexpr, SKIP: tl.constexpr, PREFIX: tl.constexpr,
        FARTHEST: tl.constexpr,
    ):  # fmt: skip
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row, group, part = tl.program_id(BESIDE).to(tl.int64), tl.program_id(1 - BESIDE), tl.program_id(2)
        length = tl.load(lengths_ptr + row).to(tl.int32)
        stored = length
        low = first_seen(length, starts_ptr, row, True, WINDOW)
        jump = low * 0
        upto: tl.constexpr = (PREFIX + BLOCK - 1) // BLOCK * BLOCK
        if PREFIX > 0:  # tiles between the prefix and the window are left out, as if the window's followed the prefix's
            jump = tl.maximum(low // BLOCK * BLOCK - upto, 0)
            stored -= jump
            first, share = _shares(jump * 0 + SKIP, stored, BLOCK, SPLITS)
        else:
            first, share = _shares(low, stored, BLOCK, SPLITS)
        start = first + part * share
        end = tl.minimum(start + share, stored)
        if part > 0 and start >= end:
            return
        table_ptr += row * table_stride
        if AHEAD:
            next_page = page_numbers(table_ptr, start + tl.arange(0, BLOCK), columns, PAGE)
        head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
        whole: tl.constexpr = WIDE == D
        here = head < PER_GROUP
        if not whole:
            here = here & (column < D)
        q_ptr += row * q_stride
        q_at = q_ptr + (group * PER_GROUP + head) * D
        most = tl.full((HEADS,), -1e30 if BITS else float("-inf"), tl.float32)  # with bits a tile may be unseen altogether
        bits = tl.load(bits_ptr + row) if BITS else 0
        weight = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, WIDE), tl.float32)
        wrong = length > columns * PAGE
        q = tl.load(q_at + column, mask=here, other=0.0)
        last, outside = (pages - 1).to(tl.uint32), tl.zeros((BLOCK,), tl.int32)
        for at in range(start, end, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            seen = entry < end
            if PREFIX > 0:
                entry += tl.where(at >= upto, jump, 0)
                seen = seen & (entry >= SKIP) & ((entry >= low) | (entry < PREFIX))
            elif WINDOW != 0:
                seen = seen & (entry >= low)
            if BITS:
                back = length - 1 - entry
                bit = (bits >> tl.minimum(tl.maximum(back, 0), BITS - 1).to(tl.int64)) & 1
                seen = seen & ((back >= BITS) | (bit != 0))
            if AHEAD:
                page = next_page
                next_page = page_numbers(table_ptr, entry + BLOCK, columns, PAGE)
            else:
                page = page_numbers(table_ptr, entry, columns, PAGE, seen)
                outside = tl.maximum(outside, (page > last).to(tl.int32))
            # A page that is not there becomes the last one: a mask that waits for it would keep loads from overlapping.
            place = ((tl.minimum(page, last).to(tl.int64) * PAGE + entry % PAGE) * G + group)[:, None] * D + column
            there = seen[:, None] if whole else seen[:, None] & (column < D)
            k = tl.load(k_ptr + place, mask=there, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + place, mask=there, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * score_scale
            if FARTHEST > 0:
                far = tl.minimum(tl.maximum(length - 1 - entry, 0), FARTHEST - 1)[None, :]
                adds = (head < PER_GROUP) & (seen & (entry >= PREFIX))[None, :]
                bias = tl.load(bias_ptr + far * H + group * PER_GROUP + head, mask=adds, other=0.0)
                scores += bias.to(q.dtype).to(tl.float32) * 1.4426950408889634  # scores are in powers of two
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))  # never -inf: every tile has an entry that is seen
            shrink = tl.exp2(most - higher)
            p = tl.exp2(scores - higher[:, None])
            weight = weight * shrink + tl.sum(p, 1)
            mixed = tl.dot(p.to(q.dtype), v, mixed * shrink[:, None], input_precision="tf32x3")
            most = higher
        if AHEAD:
            wrong = wrong | any_outside(table_ptr, tl.maximum(start, low), end, last, columns, PAGE, 32)
        if (tl.max(outside, 0) > 0) | wrong:
            mixed += float("nan")
        at_head = row * H + group * PER_GROUP + head
        working = tl.maximum((stored - first + share - 1) // tl.maximum(share, 1), 1)  # programs that share the row
        if SPLITS == 1 or working == 1:
            mixed = mixed * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            tl.store(out_ptr + at_head * D + column, mixed.to(out_ptr.dtype.element_ty), mask=here)
        else:
            at_part = at_head * SPLITS + part
            tl.store(partial_ptr + at_part * D + column, mixed, mask=here)
            tl.store(extent_ptr + 2 * at_part, most[:, None], mask=head < PER_GROUP)
            tl.store(extent_ptr + 2 * at_part + 1, weight[:, None], mask=head < PER_GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
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

    def attend_rows(
        q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
        window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
        k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, arrived: Tensor | None = None,
        blocks: AttentionBlocks | None = None, bits_N: Tensor | None = None, starts_N: Tensor | None = None,
        prefix: PrefixSpan = NO_PREFIX, bias_DH: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`paged_attention`."""
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        assert all(each is None or each.is_contiguous() for each in (bits_N, starts_N))
        assert bias_DH is None or (bias_DH.is_contiguous() and bias_DH.shape[1] == H)
        out = q_NHD.new_empty(N, H, D) if out is None else out
        size = workspace_size(N, H, D, splits)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=q_NHD.device)
        if arrived is None:
            arrived = torch.zeros(N * G if splits > 1 else 0, dtype=torch.int32, device=q_NHD.device)
        assert workspace.numel() >= size, "the workspace is for fewer rows, heads or splits"
        assert splits == 1 or arrived.numel() >= N * G, "the counts are for fewer rows or groups"
        assert all(t.is_contiguous() for t in (k_pages, v_pages, lengths_N, out, workspace, q_NHD[0]))
        assert table_NP.stride(1) == 1 or table_NP.shape[1] == 1
        b = blocks or attention_blocks(D, q_NHD.element_size(), N * G)
        b = b._replace(ahead=b.ahead and not prefix.end)  # the next tile may be far behind this one
        wide, extent = max(16, triton.next_power_of_2(D)), workspace[N * H * splits * D :]
        _attention_kernel[(G, N, splits) if b.beside else (N, G, splits)](
            q_NHD, q_NHD.stride(0), k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N,
            lengths_N if bits_N is None else bits_N, lengths_N if starts_N is None else starts_N,
            out if bias_DH is None else bias_DH, out, workspace, extent, arrived,
            scale * k_scale * math.log2(math.e), v_scale, H, G, len(k_pages), table_NP.shape[1], D=D, WIDE=wide,
            PER_GROUP=H // G,
            HEADS=max(16, triton.next_power_of_2(H // G)), PAGE=page, BLOCK=b.entries,
            WINDOW=(window or 0) if starts_N is None else -1, SPLITS=splits, PARTS=triton.next_power_of_2(splits),
            BITS=0 if bits_N is None else BITS, AHEAD=b.ahead, BESIDE=int(b.beside), SKIP=prefix.first, PREFIX=prefix.end,
            FARTHEST=0 if bias_DH is None else len(bias_DH), num_warps=b.warps, num_stages=b.stages, **early_launch(N),
        )  # fmt: skip
        return out
