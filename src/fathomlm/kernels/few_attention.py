"""Attention of a few rows of each sequence that look at the same pages: drafts of one sequence, chains and trees.

`row_attention` has a program for each row. Here a program takes a head with all rows of a sequence, so entries are loaded
once for all of them, and before the kernel in front has ended (`triton_here.early_launch`): all entries but the last few are
older than that. What rows see differs only among those last ones, the rows' own and drafts of earlier levels.

Shapes: N rows, S sequences of R rows each, H query heads, G key-value heads, D head width, P pages of a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fathomlm.kernels.row_attention import BITS
from fathomlm.kernels.row_blocks import SMS
from fathomlm.kernels.triton_here import early_launch, tl, triton

TILE = 128
"""Entries that a program takes at a time."""
WARPS, MOST_PARTS, MOST_TOGETHER = 4, 4, 32


def few_parts(sequences: int, heads: int, longest: int) -> int:
    """Programs that share a head's entries: another of them must put together what they find, which takes as long as a few
    hundred entries."""
    return max(1, min(SMS // max(1, sequences * heads), -(-longest // TILE), MOST_PARTS))


def few_space(rows: int, heads: int, head_dim: int, parts: int) -> tuple[int, int]:
    """Float32 and int32 numbers that programs leave for each other."""
    return (rows * heads * parts * (head_dim + 2), rows * heads) if parts > 1 else (0, 0)


def takes_few_rows(q_NHD: Tensor, together: int) -> bool:
    """Whether attention of rows that stand together is taken here: not where there are so many sequences that programs are
    not to share a head's entries, since a program for each row is quicker then (8 sequences of 400 tokens: 0.89 ms a pass of
    a 135M model, 0.83 with those)."""
    N, H, D = q_NHD.shape
    fits = triton is not None and q_NHD.is_cuda and q_NHD.element_size() == 2
    return fits and 1 < together <= MOST_TOGETHER and D >= 16 and N // together * H * MOST_PARTS <= SMS


if triton is not None:
    from fathomlm.kernels.row_attention import page_numbers
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _places(table_ptr, entry, asked, columns, last, group, G, D: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Where entries lie, and whether any page that is `asked` for is not there."""
        page = page_numbers(table_ptr, entry, columns, PAGE, asked)
        outside = tl.max((page > last).to(tl.int32), 0) > 0
        return ((tl.minimum(page, last).to(tl.int64) * PAGE + entry % PAGE) * G + group) * D, outside

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _few_entries(ptr, place, asked, column, D: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        there = asked[:, None] if WIDE == D else asked[:, None] & (column < D)[None, :]
        return tl.load(ptr + place[:, None] + column[None, :], mask=there, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _look(q, k, v, seen, most, weight, mixed, score_scale):  # type: ignore[no-untyped-def]
        """One tile more: `seen` by row and entry."""
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shrink, p = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        mixed = tl.dot(p.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision="ieee")
        return higher, weight, mixed

    @triton.jit(do_not_specialize=["pages", "columns"])  # type: ignore[untyped-decorator,unused-ignore]
    def _few_attention_kernel(  # type: ignore[no-untyped-def]
        q_ptr, k_ptr, v_ptr, table_ptr, table_stride, lengths_ptr, bits_ptr, out_ptr, partial_ptr, arrived_ptr,
        score_scale, v_scale, H, G, pages, columns,
        R: tl.constexpr, ROWS: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
        PER_GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ASKED: tl.constexpr,
        BITS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One head of one sequence, a share of its entries; the first program takes the last entries, too."""
        first_row, head, part = tl.program_id(0).to(tl.int64) * R, tl.program_id(1), tl.program_id(2)
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
        group = head // PER_GROUP
        length = tl.load(lengths_ptr + first_row + row, mask=row < R, other=0).to(tl.int32)
        longest, last = tl.max(length, 0), (pages - 1).to(tl.uint32)
        table_ptr += first_row * table_stride
        # All rows that are there see everything up to the last LAST entries.
        old = tl.maximum(longest - LAST, 0)
        tiles = (old + BLOCK - 1) // BLOCK
        share = (tiles + PARTS - 1) // PARTS * BLOCK
        start = part * share
        end = tl.minimum(start + share, old)
        entry = start + tl.arange(0, BLOCK)
        asked = entry < end
        place, wrong = _places(table_ptr, entry, asked, columns, last, group, G, D, PAGE)
        wrong = wrong | (longest > columns * PAGE)
        k = _few_entries(k_ptr, place, asked, column, D, WIDE)
        v = _few_entries(v_ptr, place, asked, column, D, WIDE)
        new = old + tl.arange(0, LAST)
        newer = (new < longest) & (part == 0)
        new_place, outside = _places(table_ptr, new, newer, columns, last, group, G, D, PAGE)
        wrong = wrong | outside
        bits = tl.load(bits_ptr + first_row + row, mask=row < R, other=0) if ASKED else length.to(tl.int64)
        wait_for_last(EARLY)
        let_next_start(EARLY)
        if (part > 0) & (start >= end):
            return
        there = length > 0
        inside = (row < R)[:, None] & (column < D)[None, :]
        at_head = (first_row + row) * H + head
        q = tl.load(q_ptr + at_head[:, None] * D + column[None, :], mask=inside, other=0.0)
        k_new = _few_entries(k_ptr, new_place, newer, column, D, WIDE)
        v_new = _few_entries(v_ptr, new_place, newer, column, D, WIDE)
        most = tl.full((ROWS,), -1e30, tl.float32)  # not -inf: a row may see nothing of a tile
        weight, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
        most, weight, mixed = _look(q, k, v, there[:, None] & asked[None, :], most, weight, mixed, score_scale)
        for at in range(start + BLOCK, end, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            asked = entry < end
            place, outside = _places(table_ptr, entry, asked, columns, last, group, G, D, PAGE)
            wrong = wrong | outside
            k = _few_entries(k_ptr, place, asked, column, D, WIDE)
            v = _few_entries(v_ptr, place, asked, column, D, WIDE)
            most, weight, mixed = _look(q, k, v, there[:, None] & asked[None, :], most, weight, mixed, score_scale)
        if part == 0:
            back = length[:, None] - 1 - new[None, :]
            seen = (back >= 0) & newer[None, :]
            if ASKED:
                bit = (bits[:, None] >> tl.minimum(tl.maximum(back, 0), BITS - 1).to(tl.int64)) & 1
                seen = seen & ((back >= BITS) | (bit != 0))
            most, weight, mixed = _look(q, k_new, v_new, seen, most, weight, mixed, score_scale)
        if wrong:
            mixed += float("nan")
        if PARTS == 1:
            mixed = mixed * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            tl.store(out_ptr + at_head[:, None] * D + column[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            at_part = partial_ptr + (at_head * PARTS + part) * (D + 2)
            tl.store(at_part[:, None] + column[None, :], mixed, mask=inside)
            tl.store(at_part + D, most, mask=row < R)
            tl.store(at_part + D + 1, weight, mask=row < R)
            tl.debug_barrier()  # all threads have stored before one of them says so
            working = tl.maximum((old + share - 1) // tl.maximum(share, 1), 1)
            arrived_ptr += tl.program_id(0) * H + head
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == working - 1:  # the last puts together what all have found
                tl.store(arrived_ptr, 0)
                all_ptr = partial_ptr + at_head * PARTS * (D + 2)
                most = tl.full((ROWS,), -1e30, tl.float32)
                for one in tl.static_range(PARTS):
                    other = tl.load(
                        all_ptr + one * (D + 2) + D, mask=(row < R) & (one < working), other=-1e30, cache_modifier=".cg"
                    )
                    most = tl.maximum(most, other)
                weight, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
                for one in tl.static_range(PARTS):
                    does = (row < R) & (one < working)
                    at_one = all_ptr + one * (D + 2)
                    other = tl.load(at_one + D, mask=does, other=-1e30, cache_modifier=".cg")
                    grows = tl.exp2(other - most)
                    weight += tl.load(at_one + D + 1, mask=does, other=0.0, cache_modifier=".cg") * grows
                    found = tl.load(
                        at_one[:, None] + column[None, :], mask=inside & (one < working), other=0.0, cache_modifier=".cg"
                    )
                    mixed += found * grows[:, None]
                mixed = mixed * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
                tl.store(out_ptr + at_head[:, None] * D + column[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside)

    def attend_few(
        q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float, together: int,
        nodes: int, parts: int = 1, workspace: Tensor | None = None, arrived: Tensor | None = None,
        bits_N: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None,
        tile: int | None = None, warps: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`paged_attention` where each `together` rows, one behind the other, have the same table. Rows that are there see
        alike what is more than `nodes` entries before the last of them, all of it. A row that sees anything has entries that
        the kernel in front may have stored only among those last ones."""
        (N, H, D), (page, G) = q_NHD.shape, k_pages.shape[1:3]
        out = q_NHD.new_empty(N, H, D) if out is None else out
        room, counts = few_space(N, H, D, parts)
        if workspace is None:
            workspace = torch.empty(room, dtype=torch.float32, device=q_NHD.device)
        if arrived is None:
            arrived = torch.zeros(counts, dtype=torch.int32, device=q_NHD.device)
        assert workspace.numel() >= room, "the workspace is for fewer rows, heads or parts"
        assert arrived.numel() >= counts, "the counts are for fewer rows or heads"
        assert N % together == 0
        assert all(t.is_contiguous() for t in (q_NHD, k_pages, v_pages, lengths_N, out, workspace))
        assert bits_N is None or bits_N.is_contiguous()
        assert table_NP.stride(1) == 1 or table_NP.shape[1] == 1
        _few_attention_kernel[(N // together, H, parts)](
            q_NHD, k_pages, v_pages, table_NP, table_NP.stride(0), lengths_N, lengths_N if bits_N is None else bits_N, out,
            workspace, arrived, scale * k_scale * math.log2(math.e), v_scale, H, G, len(k_pages), table_NP.shape[1],
            R=together, ROWS=max(16, triton.next_power_of_2(together)), LAST=max(16, triton.next_power_of_2(nodes)), D=D,
            WIDE=max(16, triton.next_power_of_2(D)), PER_GROUP=H // G, PAGE=page, BLOCK=tile or TILE, PARTS=parts,
            ASKED=bits_N is not None, BITS=BITS, num_warps=warps or WARPS, num_stages=2, **early_launch(N),
        )  # fmt: skip
        return out
