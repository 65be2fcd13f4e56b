"""Attention over pages where prompts are read: many rows look at the same entries, so a program takes a tile of rows that
stand together, and reads their entries once.

Shapes: N rows, H query heads, G key-value heads, D head width, P pages of a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import NO_PREFIX, AttentionBlocks, PrefixSpan, prefill_blocks
from fathomlm.kernels.triton_here import tl, triton

if triton is not None:
    from fathomlm.kernels.row_attention import any_outside, first_seen, page_numbers

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _entries(  # type: ignore[no-untyped-def]
        k_ptr, v_ptr, page, entry, there, last, G, group,
        D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, PARTLY: tl.constexpr,
    ):  # fmt: skip
        """Keys and values of some entries. PARTLY: those that are not `there` are 0, whatever their page holds."""
        column = tl.arange(0, WIDE)[None, :]
        place = ((tl.minimum(page, last).to(tl.int64) * PAGE + entry % PAGE) * G + group)[:, None] * D + column
        inside = column < D
        if PARTLY:
            inside = there[:, None] & inside
        if PARTLY or WIDE != D:
            return tl.load(k_ptr + place, mask=inside, other=0.0), tl.load(v_ptr + place, mask=inside, other=0.0)
        return tl.load(k_ptr + place), tl.load(v_ptr + place)

    @triton.jit(do_not_specialize=["rows", "pages", "columns"])  # type: ignore[untyped-decorator,unused-ignore]
    def _prefill_kernel(  # type: ignore[no-untyped-def]
        q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, starts_ptr, sequence_ptr, out_ptr,
        score_scale, v_scale, rows, H, G, pages, columns,
        D: tl.constexpr, WIDE: tl.constexpr, PER_GROUP: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, SKIP: tl.constexpr, PREFIX: tl.constexpr,
    ):  # fmt: skip
        tall: tl.constexpr = QUERIES // PER_GROUP
        upto: tl.constexpr = (PREFIX + BLOCK - 1) // BLOCK * BLOCK
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
        low = first_seen(length, starts_ptr, row, asks, WINDOW)
        sequence = tl.load(sequence_ptr + row, mask=asks, other=-1)
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, WIDE), tl.float32)
        wrong = length > columns * PAGE
        last, tile = (pages - 1).to(tl.uint32), tl.arange(0, BLOCK)
        start = first_row
        while start < last_row:  # one sequence after the other
            mine = asks & (sequence == tl.load(sequence_ptr + start))
            end = tl.max(tl.where(mine, length, 0), 0)
            least = tl.min(tl.where(mine, length, end), 0)
            row_table = table_ptr + start.to(tl.int64) * table_stride
            begin, from_, jump = 0 * least, 0 * least, 0 * least
            alone = tl.load(sequence_ptr + start) == tl.load(sequence_ptr + last_row - 1)
            if PREFIX > 0:  # tiles between the prefix and the windows are left out
                from_ = tl.min(tl.where(mine, low, end), 0)
                jump = tl.maximum(from_ // BLOCK * BLOCK - upto, 0)
                begin += SKIP // BLOCK * BLOCK
            elif WINDOW != 0:
                from_ = tl.min(tl.where(mine, low, end), 0)
                begin = from_ // BLOCK * BLOCK
            elif alone & (start == first_row):
                begin = least // BLOCK * BLOCK  # what all rows of the tile see needs no mask
                if AHEAD:
                    next_page = page_numbers(row_table, tile, columns, PAGE)
                outside = tl.zeros((BLOCK,), tl.int32)
                for at in range(0, begin, BLOCK):
                    if AHEAD:
                        page = next_page
                        next_page = page_numbers(row_table, at + BLOCK + tile, columns, PAGE)
                    else:
                        page = page_numbers(row_table, at + tile, columns, PAGE)
                        outside = tl.maximum(outside, (page > last).to(tl.int32))
                    k, v = _entries(k_ptr, v_ptr, page, at + tile, True, last, G, group, D, WIDE, PAGE, False)
                    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3") * score_scale
                    higher = tl.maximum(most, tl.max(scores, 1))
                    shrink = tl.exp2(most - higher)
                    p = tl.exp2(scores - higher[:, None])
                    weight = weight * shrink + tl.sum(p, 1)
                    mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision="tf32x3")
                    most = higher
                wrong = wrong | (tl.max(outside, 0) > 0)
            if AHEAD:
                next_page = page_numbers(row_table, begin + tile, columns, PAGE)
            for at in range(begin, end - jump, BLOCK):
                entry = at + tile
                if PREFIX > 0:
                    entry += tl.where(at >= upto, jump, 0)
                there = entry < end
                if PREFIX > 0:
                    there = there & (entry >= SKIP) & ((entry >= from_) | (entry < PREFIX))
                elif WINDOW != 0:
                    there = there & (entry >= from_)
                if AHEAD:
                    page = next_page
                    next_page = page_numbers(row_table, entry + BLOCK, columns, PAGE)
                else:
                    page = page_numbers(row_table, entry, columns, PAGE, there)
                    wrong = wrong | (mine & (tl.max((page > last).to(tl.int32), 0) > 0))
                k, v = _entries(k_ptr, v_ptr, page, entry, there, last, G, group, D, WIDE, PAGE, True)
                sees = mine[:, None] & (entry[None, :] < length[:, None])
                if PREFIX > 0:
                    front = (entry >= SKIP) & (entry < PREFIX)
                    own = (entry >= PREFIX)[None, :] & (entry[None, :] >= low[:, None])
                    sees = sees & (front[None, :] | own)
                elif WINDOW != 0:
                    sees = sees & (entry[None, :] >= low[:, None])
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3") * score_scale
                scores = tl.where(sees, scores, float("-inf"))
                higher = tl.maximum(most, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
                shrink = tl.exp2(most - base)
                p = tl.exp2(scores - base[:, None])
                weight = weight * shrink + tl.sum(p, 1)
                mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision="tf32x3")
                most = higher
            if AHEAD:
                wrong = wrong | (mine & any_outside(row_table, from_, end, last, columns, PAGE, 128))
            start = tl.max(tl.where(mine, row.to(tl.int32), 0), 0) + 1
        mixed = mixed / tl.where(weight > 0, weight, 1.0)[:, None] * v_scale
        mixed = tl.where(wrong[:, None], float("nan"), mixed)
        out_at = ((row * H + group * PER_GROUP + query % PER_GROUP) * D)[:, None] + column
        tl.store(out_ptr + out_at, mixed.to(out_ptr.dtype.element_ty), mask=here)

    def prefill_attention(
        q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, sequence_N: Tensor,
        scale: float, window: int | None = None, k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None,
        blocks: AttentionBlocks | None = None, starts_N: Tensor | None = None, prefix: PrefixSpan = NO_PREFIX,
    ) -> Tensor:  # fmt: skip
        """`paged_attention` where rows of a sequence stand together: each tile reads its entries once for all its rows. A
        tile that holds several sequences goes through them one by one."""
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        out = torch.empty_like(q_NHD, memory_format=torch.contiguous_format) if out is None else out
        assert all(t.is_contiguous() for t in (k_pages, v_pages, lengths_N, sequence_N, out, q_NHD[0]))
        assert starts_N is None or starts_N.is_contiguous()
        assert table_NP.stride(1) == 1 or table_NP.shape[1] == 1
        b = blocks or prefill_blocks(D)
        b = b._replace(ahead=b.ahead and not prefix.end)  # the next tile may be far behind this one
        queries = max(b.queries, triton.next_power_of_2(H // G))
        grid = (triton.cdiv(N, queries // (H // G)), G)
        _prefill_kernel[grid](
            q_NHD, q_NHD.stride(0), k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N,
            lengths_N if starts_N is None else starts_N, sequence_N, out,
            scale * k_scale * math.log2(math.e), v_scale, N, H, G, len(k_pages), table_NP.shape[1], D=D,
            WIDE=max(16, triton.next_power_of_2(D)), PER_GROUP=H // G, QUERIES=queries, PAGE=page, BLOCK=b.entries,
            WINDOW=(window or 0) if starts_N is None else -1, AHEAD=b.ahead, SKIP=prefix.first,
            PREFIX=prefix.end, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out
