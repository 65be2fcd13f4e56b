"""The kernel behind `paged_attention`: one row and one key-value head a program, with all query heads that share it.

Numbers of pages must be known before entries can be loaded. With `ahead` those of the next tile are loaded while this one's
entries are, so that the compiler keeps several tiles of entries on their way; otherwise each tile waits for its numbers.

With `Entrance` a row's queries, keys and values are taken as the product left them: the program scales and turns them,
leaves the row's entry in its page, and looks at that one first. Rows must then be of different sequences, since no program
sees what another one of the same call stores.

Shapes: N rows, M hidden width, H query heads, G key-value heads, D head width, W = (H + 2 G) x D, P pages of a table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import NO_PREFIX, AttentionBlocks, PrefixSpan, attention_blocks, workspace_size
from fathomlm.kernels.paged_write import LARGEST_FLOAT8, slot_count
from fathomlm.kernels.triton_here import early_launch, launch_behind, tl, triton

BITS = 64
"""Entries in front of a row that it may be told to see or not."""


class Entrance(NamedTuple):
    """What turns a product into queries, and into an entry."""

    x_NM: Tensor
    """The stream: rows are scaled by 1 / its rms."""
    eps: float
    cos_ND: Tensor
    sin_ND: Tensor
    slots_N: Tensor
    """Where each row's entry goes."""


class Ahead(NamedTuple):
    """What the layer behind will look at, in the same pages of its own planes."""

    k_pages: Tensor
    v_pages: Tensor
    entries: int
    """How many of a row's first ones are called for."""


if triton is not None:
    from fathomlm.kernels.paged_write import narrow_entry
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
    def _shares(low, end, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first entry that a row's programs look at, and how many of those before `end` each takes: whole tiles, as even
        as can be, but no fewer than LEAST, so that a short row is one program's."""
        first = low // BLOCK * BLOCK
        tiles = (tl.maximum(end - first, 0) + BLOCK - 1) // BLOCK
        return first, tl.maximum((tiles + SPLITS - 1) // SPLITS * BLOCK, LEAST)

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

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _turned(head_ptr, column, here, scale, cos, sin, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """Heads, scaled and turned, in float32."""
        beside = tl.where(column < HALF, column + HALF, column - HALF)
        x = tl.load(head_ptr + column, mask=here, other=0.0).to(tl.float32) * scale
        other = tl.load(head_ptr + beside, mask=here, other=0.0).to(tl.float32) * scale
        return x * cos + other * sin

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def fetch_ahead(  # type: ignore[no-untyped-def]
        k_ptr, v_ptr, table_ptr, length, last, columns, size,
        PAGE: tl.constexpr, MOST: tl.constexpr, MANY: tl.constexpr,
    ):  # fmt: skip
        """Call whole pages of a row's first MOST entries into the second-level cache; nothing waits for them. Products in
        between hardly use memory. `size`: numbers of a page."""
        upto = tl.minimum((tl.minimum(length, MOST) + PAGE - 1) // PAGE, columns)
        for at in range(0, upto, MANY):
            column = at + tl.arange(0, MANY)
            page = tl.load(table_ptr + column, mask=column < upto, other=0).to(tl.uint32, bitcast=True)
            place = tl.minimum(page, last).to(tl.int64) * size
            bytes_ = tl.where(column < upto, size * (k_ptr.dtype.element_ty.primitive_bitwidth // 8), 0)
            for ptr in tl.static_range(2):
                address = ((k_ptr if ptr == 0 else v_ptr) + place).to(tl.int64)
                tl.inline_asm_elementwise(
                    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                    "=r,l,r", [address, bytes_], dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip

    @triton.jit(do_not_specialize=["pages", "columns", "slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _attention_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, bits_ptr, starts_ptr, bias_ptr, out_ptr,
        partial_ptr, extent_ptr, arrived_ptr, x_ptr, x_stride, cos_ptr, cos_stride, sin_ptr, sin_stride, slots_ptr,
        k_next_ptr, v_next_ptr, score_scale, k_scale, v_scale, eps, H, G, pages, columns, slots,
        D: tl.constexpr, WIDE: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
        BITS: tl.constexpr, AHEAD: tl.constexpr, BESIDE: tl.constexpr, TURNS: tl.constexpr, DEPTH: tl.constexpr,
        DEEP: tl.constexpr, LARGEST: tl.constexpr, FETCHES: tl.constexpr, SKIP: tl.constexpr, PREFIX: tl.constexpr,
        FARTHEST: tl.constexpr, LEAST: tl.constexpr,
    ):  # fmt: skip
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row, group, part = tl.program_id(BESIDE).to(tl.int64), tl.program_id(1 - BESIDE), tl.program_id(2)
        length = tl.load(lengths_ptr + row).to(tl.int32)
        stored = tl.maximum(length - 1, 0) if TURNS else length
        low = first_seen(length, starts_ptr, row, True, WINDOW)
        jump = low * 0
        upto: tl.constexpr = (PREFIX + BLOCK - 1) // BLOCK * BLOCK
        if PREFIX > 0:  # tiles between the prefix and the window are left out, as if the window's followed the prefix's
            jump = tl.maximum(low // BLOCK * BLOCK - upto, 0)
            stored -= jump
            first, share = _shares(jump * 0 + SKIP, stored, BLOCK, SPLITS, LEAST)
        else:
            first, share = _shares(low, stored, BLOCK, SPLITS, LEAST)
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
        if TURNS:
            inside = column < D
            scale = row_inverse_rms(x_ptr, row * x_stride, eps, DEPTH, DEEP)
            cos = tl.load(cos_ptr + row * cos_stride + column, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + row * sin_stride + column, mask=inside, other=0.0).to(tl.float32)
            kind: tl.constexpr = k_ptr.dtype.element_ty
            q = _turned(q_at, column, here, scale, cos, sin, D // 2).to(q_ptr.dtype.element_ty)
            k_own = _turned(q_ptr + (H + group) * D, column, inside, scale, cos, sin, D // 2)
            v_own = tl.load(q_ptr + (H + G + group) * D + column, mask=inside, other=0.0).to(tl.float32) * scale
            k_own = narrow_entry(k_own, k_scale, kind, LARGEST)
            v_own = narrow_entry(v_own, v_scale, kind, LARGEST)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            keeps = inside & (slot >= 0) & (slot < slots) & (part == 0)
            own_at = (slot * G + group) * D + column
            tl.store(k_ptr + own_at, k_own, mask=keeps)
            tl.store(v_ptr + own_at, v_own, mask=keeps)
            own = (part == 0) & (length > 0)
            wrong = wrong | (own & ((slot < 0) | (slot >= slots)))
            score = tl.sum(q.to(tl.float32) * k_own.to(tl.float32), 1) * score_scale
            most = tl.where(own, score, most)
            weight = tl.where(own, weight + 1.0, weight)
            mixed = tl.where(own, mixed + v_own.to(tl.float32), mixed)
        else:
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
        if FETCHES > 0 and (group == 0) & (part == 0):
            fetch_ahead(k_next_ptr, v_next_ptr, table_ptr, stored, last, columns, PAGE * G * D, PAGE, FETCHES, 32)
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
        blocks: AttentionBlocks | None = None, bits_N: Tensor | None = None, entrance: Entrance | None = None,
        early: bool = False, starts_N: Tensor | None = None, ahead: Ahead | None = None, prefix: PrefixSpan = NO_PREFIX,
        bias_DH: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`paged_attention`. With an `entrance`, queries are the first heads of a product's rows, which is in front of this
        kernel: `early` as in `launch_behind`."""
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        assert all(each is None or each.is_contiguous() for each in (bits_N, starts_N))
        assert entrance is None or (bits_N is None and bias_DH is None and not prefix.end)
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
        turns = entrance is not None
        ahead = ahead or Ahead(k_pages, v_pages, 0)
        assert ahead.k_pages.shape == k_pages.shape
        if entrance is None:  # nobody looks
            entrance = Entrance(out, 0.0, out, out, lengths_N)
        else:
            assert q_NHD.stride(0) == (H + 2 * G) * D
            assert all(t.stride(1) == 1 for t in (entrance.x_NM, entrance.cos_ND, entrance.sin_ND))
        x, cos, sin, depth = entrance.x_NM, entrance.cos_ND, entrance.sin_ND, entrance.x_NM.shape[1] if turns else 1
        b = blocks or attention_blocks(D, q_NHD.element_size(), N * G)
        assert b.share % b.entries == 0, f"programs take whole tiles of {b.entries} entries, not {b.share}"
        b = b._replace(ahead=b.ahead and not prefix.end)  # the next tile may be far behind this one
        wide, extent = max(16, triton.next_power_of_2(D)), workspace[N * H * splits * D :]
        _attention_kernel[(G, N, splits) if b.beside else (N, G, splits)](
            q_NHD, q_NHD.stride(0), k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N,
            lengths_N if bits_N is None else bits_N, lengths_N if starts_N is None else starts_N,
            out if bias_DH is None else bias_DH, out, workspace, extent, arrived,
            x, x.stride(0), cos, cos.stride(0), sin, sin.stride(0), entrance.slots_N, ahead.k_pages,
            ahead.v_pages, scale * k_scale * math.log2(math.e), k_scale, v_scale, entrance.eps, H, G, len(k_pages),
            table_NP.shape[1], slot_count(k_pages), D=D, WIDE=wide, PER_GROUP=H // G,
            HEADS=max(16, triton.next_power_of_2(H // G)), PAGE=page, BLOCK=b.entries,
            WINDOW=(window or 0) if starts_N is None else -1, SPLITS=splits, PARTS=triton.next_power_of_2(splits),
            BITS=0 if bits_N is None else BITS, AHEAD=b.ahead, BESIDE=int(b.beside), TURNS=turns, DEPTH=depth,
            DEEP=triton.next_power_of_2(depth), LARGEST=LARGEST_FLOAT8, FETCHES=ahead.entries, SKIP=prefix.first,
            PREFIX=prefix.end, FARTHEST=0 if bias_DH is None else len(bias_DH), LEAST=b.share, num_warps=b.warps,
            num_stages=b.stages, **(launch_behind(early) if turns else early_launch(N)),
        )  # fmt: skip
        return out
