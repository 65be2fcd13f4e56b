"""Products of decoding rows with weights, each with what stands around it: a norm in front, a gate, the residual stream.

A row is one token of one sequence. With few rows a product is bound by reading its weight once, and every kernel more costs
a launch and a trip of the rows through memory, so the neighbours of a product are computed in it. A norm's weight is folded
into the weight behind it (`half.folded`); what is left of the norm is a number for each row, which a program finds in the
tiles of x that it multiplies anyway: beside x w^T it sums x x^T, whose diagonal are the squares. Tensor cores do that for
next to nothing, while taking the tiles into registers to square them costs more than the product itself (and Triton 3.6
then lets the next tile overwrite one that a Hopper tensor core still reads). One row alone needs no tensor core: its product
is summed directly, which hides memory's latency better. Launch settings come from `row_blocks`. All outputs can be given
(`out`), and nothing here waits for the device, so calls can be recorded in a graph, once one call before has compiled the
kernel.

A weight may have one byte an entry and a scale for each of its rows (`QuantizedWeight`): a program reads half as much,
widens it in registers, and scales its sums. Tensor cores that multiply from registers then leave squaring x there free, too.

Shapes: N rows, M hidden width, W output width, I inner width, K input width of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.few_rows import takes_few
from fathomlm.kernels.gates import GATES, gated
from fathomlm.kernels.half import inverse_rms
from fathomlm.kernels.quantized import QuantizedWeight, whole_weight
from fathomlm.kernels.row_blocks import MAX_SPLIT, Blocks, product_blocks, row_block, share_of
from fathomlm.kernels.triton_here import early_launch, tl, triton
from fathomlm.kernels.wide_rows import many_rows

if triton is not None:
    from fathomlm.kernels.few_rows import few_gated, few_linear
    from fathomlm.kernels.gates import activated
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last
    from fathomlm.kernels.wide_rows import wide_add_linear, wide_linear, wide_norm_gated

RowWeight = Tensor | QuantizedWeight


class SplitSpace(NamedTuple):
    """Scratch for `add_linear`, where several programs share one sum. One serves any number of calls that do not run at the
    same time: each leaves `arrived` as it was found."""

    partial: Tensor
    """Sums of shares, float32."""
    arrived: Tensor
    """How many programs of a tile are done, int32, all zero between calls."""

    @staticmethod
    def build(rows: int, width: int, device: torch.device | str) -> SplitSpace:
        """Enough for outputs of up to `rows` x `width`, whatever the split."""
        tall = -(-rows // 64) * 64
        tiles = tall // 16 * -(-width // 16)
        partial = torch.empty(MAX_SPLIT * tall * (width + 128), dtype=torch.float32, device=device)
        return SplitSpace(partial, torch.zeros(tiles, dtype=torch.int32, device=device))


MOST_ROWS = 64
"""Rows of one tile."""


def few_rows(x: Tensor) -> bool:
    """Whether x (..., M) is so few rows that these kernels are quicker than a library's product: on a GPU, in 16 bits, where
    no gradient is asked for."""
    few = x.is_cuda and x.element_size() == 2 and x.numel() // x.shape[-1] <= MOST_ROWS
    return triton is not None and few and not torch.is_grad_enabled()


def norm_linear(
    x_NM: Tensor,
    weight_WM: RowWeight,
    eps: float,
    scale: bool = True,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """s (x @ weight^T), s = 1 / rms(x) for each row, or 1 without `scale`: (N, W), in `out_dtype`, by itself x's own."""
    if not scale and many_rows(x_NM, weight_WM, "scores"):
        return wide_linear(x_NM, whole_weight(weight_WM, x_NM.dtype), out_dtype, out)
    if isinstance(weight_WM, Tensor) and takes_few(x_NM, weight_WM):
        return few_linear(x_NM, weight_WM, eps, scale, out_dtype=out_dtype, out=out)
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_linear(x_NM, weight_WM, eps, scale, out_dtype, out)
    return plain_norm_linear(x_NM, weight_WM, eps, scale, out_dtype, out)


def plain_norm_linear(
    x_NM: Tensor,
    weight_WM: RowWeight,
    eps: float,
    scale: bool = True,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The meaning."""
    product_NW = plain_product(x_NM, weight_WM)
    if scale:
        product_NW = product_NW * inverse_rms(x_NM, eps)
    return _given(out, product_NW, out_dtype or x_NM.dtype)


def norm_gated(x_NM: Tensor, both_2IM: RowWeight, eps: float, out: Tensor | None = None, activation: str = "silu") -> Tensor:
    """act(gate) * up (N, I): the upper half of s (x @ both^T) and its lower half, s = 1 / rms(x) for each row. The
    activation is one of `GATES`."""
    if many_rows(x_NM, both_2IM, "gated"):
        return wide_norm_gated(x_NM, whole_weight(both_2IM, x_NM.dtype), eps, out, activation=activation)
    if isinstance(both_2IM, Tensor) and takes_few(x_NM, both_2IM):
        return few_gated(x_NM, both_2IM, eps, out, activation=activation)
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_gated(x_NM, both_2IM, eps, out, activation=activation)
    return plain_norm_gated(x_NM, both_2IM, eps, out, activation)


def plain_norm_gated(
    x_NM: Tensor, both_2IM: RowWeight, eps: float, out: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """The meaning."""
    return _given(out, gated(plain_product(x_NM, both_2IM), inverse_rms(x_NM, eps), activation), x_NM.dtype)


def add_linear(
    stream_NM: Tensor | None, x_NK: Tensor, weight_MK: RowWeight, out: Tensor | None = None, space: SplitSpace | None = None
) -> Tensor:
    """stream + x @ weight^T, or without a stream the product alone. `out` may be the stream itself, but must not overlap x.
    The same input gives the same bits: where programs share a sum, whichever comes last adds the shares in order. Without
    `space` none do, which is slower where rows and columns are few."""
    if many_rows(x_NK, weight_MK, "added"):
        return wide_add_linear(stream_NM, x_NK, whole_weight(weight_MK, x_NK.dtype), out)
    if isinstance(weight_MK, Tensor) and takes_few(x_NK, weight_MK):
        return few_linear(x_NK, weight_MK, 0.0, scale=False, stream_NW=stream_NM, out=out)
    if triton is not None and x_NK.is_cuda:
        return _triton_add_linear(stream_NM, x_NK, weight_MK, out, space)
    return plain_add_linear(stream_NM, x_NK, weight_MK, out)


def plain_add_linear(stream_NM: Tensor | None, x_NK: Tensor, weight_MK: RowWeight, out: Tensor | None = None) -> Tensor:
    """The meaning."""
    product_NM = plain_product(x_NK, weight_MK)
    return _given(out, product_NM, x_NK.dtype) if stream_NM is None else _given(out, stream_NM + product_NM, stream_NM.dtype)


def plain_product(x: Tensor, weight: RowWeight) -> Tensor:
    return weight.plain_product(x) if isinstance(weight, QuantizedWeight) else F.linear(x, weight)


def _given(out: Tensor | None, result: Tensor, dtype: torch.dtype) -> Tensor:
    return result.to(dtype) if out is None else out.copy_(result)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _widened(w):  # type: ignore[no-untyped-def]
        """In float32. A GPU converts integers at a quarter of the rate at which it adds, so a byte becomes the end of a
        mantissa instead: of 2^23 + 128 + w, whose rest is then taken away."""
        if w.dtype == tl.int8:
            bits = w.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
            return bits.to(tl.float32, bitcast=True) - 8388736.0
        return w.to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _weight_tile(weight_ptr, weight_row, k, first, DEPTH: tl.constexpr, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = weight_ptr + weight_row.to(tl.int64)[:, None] * DEPTH + k[None, :]
        # Bounds are constants, or the compiler would not know that whole vectors are inside.
        inside = (k < first + SHARE) & (k < DEPTH)
        return tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _one_row_tile(x_ptr, w, k, first, DEPTH: tl.constexpr, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
        inside = (k < first + SHARE) & (k < DEPTH)
        x = tl.load(x_ptr + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        return _widened(w) * x, x * x

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _one_row_product(  # type: ignore[no-untyped-def]
        x_ptr, weight_ptr, scales_ptr, weight_row, first,
        DEPTH: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """`row_product` of a single row. Where BLOCK and half of it, or BLOCK alone, hold the whole share, all of the weight
        is on its way before anything else is asked for, also before the kernel in front has ended."""
        let_next_start(EARLY)
        k = first + tl.arange(0, BLOCK)
        rest: tl.constexpr = max(BLOCK // 2, 1)
        w = _weight_tile(weight_ptr, weight_row, k, first, DEPTH, SHARE)
        if BLOCK < SHARE and BLOCK + rest >= SHARE:
            more = first + BLOCK + tl.arange(0, rest)
            w_more = _weight_tile(weight_ptr, weight_row, more, first, DEPTH, SHARE)
            wait_for_last(EARLY)
            products, squares = _one_row_tile(x_ptr, w, k, first, DEPTH, SHARE)
            products_more, squares_more = _one_row_tile(x_ptr, w_more, more, first, DEPTH, SHARE)
            product = tl.sum(products, 1) + tl.sum(products_more, 1)
            square = tl.sum(squares, 1) + tl.sum(squares_more, 1)
        else:
            wait_for_last(EARLY)
            products, squares = _one_row_tile(x_ptr, w, k, first, DEPTH, SHARE)
            for at in tl.static_range(BLOCK, SHARE, BLOCK):
                w = _weight_tile(weight_ptr, weight_row, k + at, first, DEPTH, SHARE)
                products_more, squares_more = _one_row_tile(x_ptr, w, k + at, first, DEPTH, SHARE)
                products, squares = products + products_more, squares + squares_more
            product, square = tl.sum(products, 1), tl.sum(squares, 1)
        if SCALED:
            product *= tl.load(scales_ptr + weight_row)
        return product[None, :], square

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def row_product(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, scales_ptr, row, here, weight_row, first,
        DEPTH: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
        SCALED: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Rows of x that are `here` times rows of a weight, times their scales if SCALED, summed over SHARE entries from
        `first` on, in float32; with NORM also each row's sum of squares. KEEP: other programs read the same weight rows, so
        they should stay in the cache. (Triton 3.6 drops that hint for loads it pipelines.)"""
        if row.shape[0] == 1:
            return _one_row_product(x_ptr, weight_ptr, scales_ptr, weight_row, first, DEPTH, SHARE, BLOCK, SCALED, EARLY)
        wait_for_last(EARLY)
        k = first + tl.arange(0, BLOCK)
        here = here[:, None]
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        w_at = weight_ptr + weight_row.to(tl.int64)[:, None] * DEPTH + k[None, :]
        total = tl.zeros((row.shape[0], weight_row.shape[0]), tl.float32)
        gram = tl.zeros((row.shape[0], row.shape[0]), tl.float32)
        squares = tl.zeros((row.shape[0], BLOCK), tl.float32)
        policy: tl.constexpr = "" if KEEP else "evict_first"
        for at in range(0, SHARE, BLOCK):
            if SHARE % BLOCK == 0 and DEPTH % SHARE == 0:
                x = tl.load(x_at + at, mask=here, other=0.0, eviction_policy="evict_last")
                w = tl.load(w_at + at, eviction_policy=policy)
            else:
                inside = ((k + at < first + SHARE) & (k + at < DEPTH))[None, :]
                x = tl.load(x_at + at, mask=here & inside, other=0.0, eviction_policy="evict_last")
                w = tl.load(w_at + at, mask=inside, other=0.0, eviction_policy=policy)
            if w.dtype == tl.int8:
                w = _widened(w)
            total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="tf32x3")
            if NORM and SCALED:
                squares += x.to(tl.float32) * x.to(tl.float32)
            elif NORM:
                gram = tl.dot(x, tl.trans(x), gram, input_precision="tf32x3")
        let_next_start(EARLY)  # not before: programs that wait would take the room of those that are yet to begin
        if SCALED:
            return total * tl.load(scales_ptr + weight_row)[None, :], tl.sum(squares, 1)
        number = tl.arange(0, row.shape[0])
        return total, tl.sum(tl.where(number[:, None] == number[None, :], gram, 0.0), 1)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def row_scale(squares, eps, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
        return tl.rsqrt(squares / DEPTH + eps)[:, None]

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, scales_ptr, out_ptr, out_stride, rows, width, eps,
        DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
        NORM: tl.constexpr, KEEP: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total, squares = row_product(
            x_ptr, x_stride, weight_ptr, scales_ptr, row, row < rows, tl.minimum(column, width - 1), 0,
            DEPTH, DEPTH, BLOCK, NORM, KEEP, SCALED, EARLY,
        )  # fmt: skip
        if NORM:
            total *= row_scale(squares, eps, DEPTH)
        here = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_gated_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, scales_ptr, out_ptr, out_stride, rows, width, eps,
        DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
        SCALED: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        # Gate and up of a column are neighbours in the tile, so that both come out in one thread.
        tile = tl.arange(0, 2 * COLUMNS)
        weight_row = tl.minimum(tl.program_id(1) * COLUMNS + tile // 2, width - 1) + tile % 2 * width
        total, squares = row_product(
            x_ptr, x_stride, weight_ptr, scales_ptr, row, row < rows, weight_row, 0,
            DEPTH, DEPTH, BLOCK, True, KEEP, SCALED, EARLY,
        )  # fmt: skip
        total *= row_scale(squares, eps, DEPTH)
        gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS, 2)))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (row < rows)[:, None] & (column < width)[None, :]
        inner = activated(gate, GATE) * up
        tl.store(out_ptr + row[:, None] * out_stride + column[None, :], inner.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _add_linear_kernel(  # type: ignore[no-untyped-def]
        stream_ptr, stream_stride, x_ptr, x_stride, weight_ptr, scales_ptr, out_ptr, out_stride, partial_ptr, arrived_ptr,
        rows, width,
        DEPTH: tl.constexpr, SHARE: tl.constexpr, SPLIT: tl.constexpr, ADDS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, SCALED: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (row < rows)[:, None] & (column < width)[None, :]
        total, _ = row_product(
            x_ptr, x_stride, weight_ptr, scales_ptr, row, row < rows, tl.minimum(column, width - 1),
            tl.program_id(2) * SHARE, DEPTH, SHARE, BLOCK, False, KEEP, SCALED, EARLY,
        )  # fmt: skip
        if SPLIT > 1:
            tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            inside = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            tile_ptr = partial_ptr + tile * SPLIT * ROWS * COLUMNS + inside
            tl.store(tile_ptr + tl.program_id(2) * ROWS * COLUMNS, total)
            tl.debug_barrier()  # all threads have stored before one of them says so
            last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
            if last:
                total = tl.zeros((ROWS, COLUMNS), tl.float32)
                for share in tl.static_range(SPLIT):  # past the first-level cache, which does not see other programs
                    total += tl.load(tile_ptr + share * ROWS * COLUMNS, cache_modifier=".cg")
                tl.store(arrived_ptr + tile, 0)
            here = here & last
        if ADDS:
            stream = tl.load(stream_ptr + row[:, None] * stream_stride + column[None, :], mask=here, other=0.0)
            total += stream.to(tl.float32)
        at = row[:, None] * out_stride + column[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)

    def _triton_norm_linear(
        x_NM: Tensor,
        weight_WM: RowWeight,
        eps: float,
        scale: bool = True,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        blocks: Blocks | None = None,
    ) -> Tensor:
        (N, M), W = x_NM.shape, weight_WM.shape[0]
        if out is None:
            out = x_NM.new_empty(N, W, dtype=out_dtype or x_NM.dtype)
        w = check_rows(weight_WM, x_NM, out)
        b = blocks or product_blocks(N, W, M, w.size)
        tall = row_block(N, x_NM.element_size(), narrow=w.narrow)
        grid = (triton.cdiv(N, tall), triton.cdiv(W, b.columns))
        _norm_linear_kernel[grid](
            x_NM, x_NM.stride(0), w.data, w.scales, out, out.stride(0), N, W, eps, DEPTH=M, ROWS=tall, COLUMNS=b.columns,
            BLOCK=b.depth, NORM=scale, KEEP=grid[0] > 1, SCALED=w.narrow, num_warps=b.warps, num_stages=b.stages,
            **early_launch(N),
        )  # fmt: skip
        return out

    def _triton_norm_gated(
        x_NM: Tensor, both_2IM: RowWeight, eps: float, out: Tensor | None = None, blocks: Blocks | None = None,
        activation: str = "silu",
    ) -> Tensor:  # fmt: skip
        (N, M), width = x_NM.shape, both_2IM.shape[0] // 2
        out = x_NM.new_empty(N, width) if out is None else out
        w = check_rows(both_2IM, x_NM, out)
        b = blocks or product_blocks(N, width, M, w.size, weights=2)
        tall = row_block(N, x_NM.element_size(), narrow=w.narrow)
        grid = (triton.cdiv(N, tall), triton.cdiv(width, b.columns))
        _norm_gated_kernel[grid](
            x_NM, x_NM.stride(0), w.data, w.scales, out, out.stride(0), N, width, eps, DEPTH=M, ROWS=tall, COLUMNS=b.columns,
            BLOCK=b.depth, KEEP=grid[0] > 1, SCALED=w.narrow, GATE=GATES[activation], num_warps=b.warps,
            num_stages=b.stages, **early_launch(N),
        )  # fmt: skip
        return out

    def _triton_add_linear(
        stream_NM: Tensor | None,
        x_NK: Tensor,
        weight_MK: RowWeight,
        out: Tensor | None = None,
        space: SplitSpace | None = None,
        blocks: Blocks | None = None,
    ) -> Tensor:
        (N, K), M = x_NK.shape, weight_MK.shape[0]
        out = (x_NK if stream_NM is None else stream_NM).new_empty(N, M) if out is None else out
        stream = out if stream_NM is None else stream_NM  # without one nobody looks at it
        w = check_rows(weight_MK, x_NK, out, stream)
        b = blocks or product_blocks(N, M, K, w.size, splits=space is not None)
        tall, share = row_block(N, x_NK.element_size(), narrow=w.narrow), share_of(K, b.split)
        grid = (triton.cdiv(N, tall), triton.cdiv(M, b.columns), triton.cdiv(K, share))
        if space is None:
            space = SplitSpace.build(N if grid[2] > 1 else 0, M, x_NK.device)
        assert grid[2] == 1 or (
            space.partial.numel() >= grid[0] * grid[1] * grid[2] * tall * b.columns
            and space.arrived.numel() >= grid[0] * grid[1]
        ), "the scratch is for fewer rows or a narrower stream"
        _add_linear_kernel[grid](
            stream, stream.stride(0), x_NK, x_NK.stride(0), w.data, w.scales, out, out.stride(0), *space, N, M,
            DEPTH=K, SHARE=share, SPLIT=grid[2], ADDS=stream_NM is not None, ROWS=tall, COLUMNS=b.columns, BLOCK=b.depth,
            KEEP=grid[0] > 1, SCALED=w.narrow, num_warps=b.warps, num_stages=b.stages, **early_launch(N),
        )  # fmt: skip
        return out

    class KernelWeight(NamedTuple):
        """A weight as kernels are given it."""

        data: Tensor
        scales: Tensor
        """Anything where it is not `narrow`: kernels then do not look."""
        size: int
        """Bytes of an entry, by which programs are cut; float32 rows decide that alone."""
        narrow: bool

    def check_rows(weight: RowWeight, x: Tensor, *others: Tensor) -> KernelWeight:
        """Kernels step through rows by their strides, and through everything else as if it lay in one piece."""
        narrow = isinstance(weight, QuantizedWeight)
        data, scales = (weight.data, weight.scales) if isinstance(weight, QuantizedWeight) else (weight, weight)
        assert data.is_contiguous()
        assert data.element_size() == 1 if narrow else data.dtype == x.dtype
        assert all(t.stride(-1) == 1 for t in (x, *others))
        size = x.element_size() if x.element_size() >= 4 else data.element_size()
        return KernelWeight(data, scales, size, narrow)
