"""Products of 2 to 16 rows with weights, as `row_linear` has them, for passes in which nothing but the way from one kernel
to the next takes time: rows that verify drafts of one sequence or a few.

A program takes a few columns and has all of their weight on its way before it waits for the kernel in front
(`triton_here.early_launch`); then it reads the rows whole. Its warps share the sum: each multiplies its part of the terms
with a tensor core that takes 16 rows from registers, and what they have is added in the end. So no tile waits for another
one, and no program for another program.

Weights of one byte, float32 and more rows stay with `row_linear`, whose plain functions are the meaning here, too.

Shapes: N rows, M hidden width, W output width, I inner width, K input width of a product, D head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.kernels.gates import GATES
from fathomlm.kernels.paged_write import LARGEST_FLOAT8, slot_count
from fathomlm.kernels.triton_here import early_launch, tl, triton

MOST_FEW = 16
"""Rows of a product: what a tensor core takes at once. With 32 `row_linear` is quicker (1.04 against 0.90 ms for all of a
135M model's drafted step on an H200; with 16 it is 0.69)."""
DEEPEST = 2048
"""Terms of a sum: all of a program's weight and rows are in registers at once."""
WIDEST = 8192
"""Columns: a head over a vocabulary takes so long that nothing needs hiding, and is quicker in larger tiles."""
_taken = [False]


class FewBlocks(NamedTuple):
    columns: int
    """Rows of the weight that a program takes: eight at least, which is what a tensor core multiplies at once."""
    warps: int
    """That share the sum, each 16 terms at a time at least."""
    leads: bool
    """Whether the next kernel may start before this one's wait is over. Not where it reads more than weights then."""


NARROW, WIDE, WARPS, LEADS = 8, 16, 4, True
"""Columns of a program for weights of up to `FEW_COLUMNS` rows and for others, its warps, and whether it leads."""
FEW_COLUMNS = 1152


def few_blocks(width: int) -> FewBlocks:
    """For a product with a weight of `width` rows: about as many programs as multiprocessors."""
    return FewBlocks(NARROW if width <= FEW_COLUMNS else WIDE, WARPS, LEADS)


@contextlib.contextmanager
def taking_few(taken: bool = True) -> Iterator[None]:
    """Products of few rows are these here, as long as it lasts."""
    before, _taken[0] = _taken[0], taken
    try:
        yield
    finally:
        _taken[0] = before


def takes_few(x_NK: Tensor, weight: object) -> bool:
    """Whether a product of rows with a weight is taken here."""
    if not _taken[0] or not 1 < len(x_NK) <= MOST_FEW or not isinstance(weight, Tensor) or triton is None:
        return False
    wide = weight.shape[0] <= WIDEST and 64 <= x_NK.shape[1] <= DEEPEST
    return wide and x_NK.is_cuda and x_NK.element_size() == 2 and weight.dtype == x_NK.dtype


if triton is not None:
    from fathomlm.kernels.gates import activated
    from fathomlm.kernels.paged_write import put_halves
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _apart(  # type: ignore[no-untyped-def]
        ptr, row_at, here, first: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr, PARTS: tl.constexpr,
        ALL: tl.constexpr,
    ):  # fmt: skip
        """PIECE terms of rows from `first` on, in as many PARTS as warps share them: (PARTS, rows, PIECE / PARTS)."""
        each: tl.constexpr = PIECE // PARTS
        k = first + tl.arange(0, PARTS)[:, None, None] * each + tl.arange(0, each)[None, None, :]
        at = ptr + row_at[None, :, None] + k
        if ALL and first + PIECE <= DEPTH:
            return tl.load(at)
        inside = k < DEPTH
        if not ALL:
            inside = inside & here[None, :, None]
        return tl.load(at, mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _squared(x):  # type: ignore[no-untyped-def]
        wide = x.to(tl.float32)
        return tl.sum(tl.sum(wide * wide, 2), 0)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _begin(  # type: ignore[no-untyped-def]
        weight_ptr, weight_row, DEPTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
        LEADS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Rows of a weight, FIRST terms and REST more (powers of two), on their way while the kernel in front still runs;
        behind this, what that one leaves may be read."""
        if LEADS:
            let_next_start(EARLY)
        weight_at = weight_row.to(tl.int64) * DEPTH
        w = _apart(weight_ptr, weight_at, weight_row, 0, DEPTH, FIRST, PARTS, True)
        w_rest = w
        if REST > 0:
            w_rest = _apart(weight_ptr, weight_at, weight_row, FIRST, DEPTH, REST, PARTS, True)
        wait_for_last(EARLY)
        if not LEADS:
            let_next_start(EARLY)
        return w, w_rest

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _product(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, w, w_rest, row, here, DEPTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
        PARTS: tl.constexpr, NORM: tl.constexpr,
    ):  # fmt: skip
        """Rows of x times what `_begin` has loaded, (rows, columns) in float32, and with NORM each row's sum of squares."""
        x_at = row.to(tl.int64) * x_stride
        x = _apart(x_ptr, x_at, here, 0, DEPTH, FIRST, PARTS, False)
        total = tl.zeros((PARTS, row.shape[0], w.shape[1]), tl.float32)
        squares = tl.zeros((row.shape[0],), tl.float32)
        if REST > 0:
            x_rest = _apart(x_ptr, x_at, here, FIRST, DEPTH, REST, PARTS, False)
        total = tl.dot(x, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
        if NORM:
            squares = _squared(x)
        if REST > 0:
            total = tl.dot(x_rest, tl.permute(w_rest, (0, 2, 1)), total, input_precision="ieee")
            if NORM:
                squares += _squared(x_rest)
        return tl.sum(total, 0), squares

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _few_linear_kernel(  # type: ignore[no-untyped-def]
        stream_ptr, stream_stride, x_ptr, x_stride, weight_ptr, out_ptr, out_stride, rows, width, eps,
        DEPTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, NORM: tl.constexpr, ADDS: tl.constexpr, LEADS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        w, w_rest = _begin(weight_ptr, tl.minimum(column, width - 1), DEPTH, FIRST, REST, PARTS, LEADS, EARLY)
        here = (row < rows)[:, None] & (column < width)[None, :]
        if ADDS:  # asked for before the product, so that it does not wait for both
            stream = tl.load(stream_ptr + row[:, None] * stream_stride + column[None, :], mask=here, other=0.0)
        total, squares = _product(x_ptr, x_stride, w, w_rest, row, row < rows, DEPTH, FIRST, REST, PARTS, NORM)
        if NORM:
            total *= tl.rsqrt(squares / DEPTH + eps)[:, None]
        if ADDS:
            total += stream.to(tl.float32)
        at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _few_gated_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, out_ptr, out_stride, rows, width, eps,
        DEPTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, GATE: tl.constexpr, LEADS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row, tile = tl.arange(0, ROWS), tl.arange(0, 2 * COLUMNS)
        # Gate and up of a column are neighbours in the tile, so that both come out in one thread.
        weight_row = tl.minimum(tl.program_id(0) * COLUMNS + tile // 2, width - 1) + tile % 2 * width
        w, w_rest = _begin(weight_ptr, weight_row, DEPTH, FIRST, REST, PARTS, LEADS, EARLY)
        total, squares = _product(x_ptr, x_stride, w, w_rest, row, row < rows, DEPTH, FIRST, REST, PARTS, True)
        total *= tl.rsqrt(squares / DEPTH + eps)[:, None]
        gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS, 2)))
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        here = (row < rows)[:, None] & (column < width)[None, :]
        inner = activated(gate, GATE) * up
        tl.store(out_ptr + row[:, None] * out_stride + column[None, :], inner.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["rows", "slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _few_qkv_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, cos_ptr, cos_stride, sin_ptr, sin_stride, q_ptr, k_ptr, v_ptr, slots_ptr,
        rows, slots, eps, k_scale, v_scale, H, G,
        DEPTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr,
        ROWS: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row = tl.arange(0, ROWS)
        parts: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
        head, first = tl.program_id(0) // parts, tl.program_id(0) % parts * PAIRS
        # The two of a pair are neighbours in the tile, so that both come out in one thread.
        tile = tl.arange(0, 2 * PAIRS)
        weight_row = head * 2 * HALF + tl.minimum(first + tile // 2, HALF - 1) + tile % 2 * HALF
        w, w_rest = _begin(weight_ptr, weight_row, DEPTH, FIRST, REST, PARTS, False, EARLY)
        pair = (first + tl.arange(0, PAIRS))[None, :]
        here = (row < rows)[:, None] & (pair < HALF)
        turns = here & (head < H + G)  # asked for before the product, so that it does not wait for both
        cos_at = cos_ptr + row[:, None] * cos_stride + pair
        sin_at = sin_ptr + row[:, None] * sin_stride + pair
        cos_low, cos_high = tl.load(cos_at, mask=turns, other=1.0), tl.load(cos_at + HALF, mask=turns, other=1.0)
        sin_low, sin_high = tl.load(sin_at, mask=turns, other=0.0), tl.load(sin_at + HALF, mask=turns, other=0.0)
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)[:, None]
        total, squares = _product(x_ptr, x_stride, w, w_rest, row, row < rows, DEPTH, FIRST, REST, PARTS, True)
        total *= tl.rsqrt(squares / DEPTH + eps)[:, None]
        low, high = tl.split(tl.reshape(total, (ROWS, PAIRS, 2)))
        turned = low * cos_low.to(tl.float32) + high * sin_low.to(tl.float32)
        high = high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)
        low = turned
        if head < H:
            put_halves(q_ptr, (row[:, None] * H + head) * 2 * HALF + pair, low, high, 1.0, here, HALF, LARGEST)
        else:
            here = here & (slot >= 0) & (slot < slots)
            if head < H + G:
                put_halves(k_ptr, (slot * G + head - H) * 2 * HALF + pair, low, high, k_scale, here, HALF, LARGEST)
            else:
                put_halves(v_ptr, (slot * G + head - H - G) * 2 * HALF + pair, low, high, v_scale, here, HALF, LARGEST)

    def _cut(rows: int, depth: int, warps: int) -> dict[str, int]:
        """How the sum and the rows are laid out: the largest power of two below, and what holds the rest."""
        first = max(1 << (depth.bit_length() - 1), 16 * warps)
        rest = 0 if depth <= first else max(triton.next_power_of_2(depth - first), 16 * warps)
        assert rows <= MOST_FEW
        return {"DEPTH": depth, "FIRST": first, "REST": rest, "PARTS": warps, "ROWS": MOST_FEW}

    def few_linear(
        x_NK: Tensor, weight_WK: Tensor, eps: float, scale: bool, stream_NW: Tensor | None = None,
        out_dtype: torch.dtype | None = None, out: Tensor | None = None, blocks: FewBlocks | None = None,
    ) -> Tensor:  # fmt: skip
        """`norm_linear`, or with a stream `add_linear`."""
        (N, K), W = x_NK.shape, weight_WK.shape[0]
        if out is None:
            out = x_NK.new_empty(N, W, dtype=out_dtype or (x_NK.dtype if stream_NW is None else stream_NW.dtype))
        stream = out if stream_NW is None else stream_NW
        _check(weight_WK, x_NK, out, stream)
        b = blocks or few_blocks(W)
        _few_linear_kernel[(triton.cdiv(W, b.columns),)](
            stream, stream.stride(0), x_NK, x_NK.stride(0), weight_WK, out, out.stride(0), N, W, eps,
            COLUMNS=b.columns, NORM=scale, ADDS=stream_NW is not None, LEADS=b.leads, num_warps=b.warps,
            **_cut(N, K, b.warps), **early_launch(N),
        )  # fmt: skip
        return out

    def few_gated(
        x_NM: Tensor, both_2IM: Tensor, eps: float, out: Tensor | None = None, blocks: FewBlocks | None = None,
        activation: str = "silu",
    ) -> Tensor:  # fmt: skip
        """`norm_gated`."""
        (N, M), width = x_NM.shape, both_2IM.shape[0] // 2
        out = x_NM.new_empty(N, width) if out is None else out
        _check(both_2IM, x_NM, out)
        b = blocks or few_blocks(2 * width)
        _few_gated_kernel[(triton.cdiv(width, b.columns // 2),)](
            x_NM, x_NM.stride(0), both_2IM, out, out.stride(0), N, width, eps, COLUMNS=b.columns // 2,
            GATE=GATES[activation], LEADS=b.leads, num_warps=b.warps, **_cut(N, M, b.warps), **early_launch(N),
        )  # fmt: skip
        return out

    def few_qkv_rope_write(
        x_NM: Tensor, qkv_WM: Tensor, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
        k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
        out: Tensor | None = None, blocks: FewBlocks | None = None,
    ) -> Tensor:  # fmt: skip
        """`row_qkv.norm_qkv_rope_write`. It never leads: attention behind it looks at lengths and pages before it waits."""
        (N, M), D = x_NM.shape, cos_ND.shape[-1]
        out = x_NM.new_empty(N, heads, D) if out is None else out
        _check(qkv_WM, x_NM, cos_ND, sin_ND)
        assert all(t.is_contiguous() for t in (out, k_pages, v_pages, slots_N))
        assert qkv_WM.shape[0] == (heads + 2 * groups) * D
        b = blocks or few_blocks(qkv_WM.shape[0])
        pairs = min(b.columns // 2, triton.next_power_of_2(D // 2))
        _few_qkv_kernel[((heads + 2 * groups) * triton.cdiv(D // 2, pairs),)](
            x_NM, x_NM.stride(0), qkv_WM, cos_ND, cos_ND.stride(0), sin_ND, sin_ND.stride(0), out, k_pages, v_pages,
            slots_N, N, slot_count(k_pages), eps, k_scale, v_scale, heads, groups, HALF=D // 2, PAIRS=pairs,
            LARGEST=LARGEST_FLOAT8, num_warps=b.warps, **_cut(N, M, b.warps), **early_launch(N),
        )  # fmt: skip
        return out

    def _check(weight: Tensor, *others: Tensor) -> None:
        assert weight.is_contiguous()
        assert all(t.stride(-1) == 1 for t in others)
