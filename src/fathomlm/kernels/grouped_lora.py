"""What each depth of a relaxed recursive model adds to a shared linear, for rows at different depths in one call
(per-depth LoRA, thesis 3.3.3).

Rows come in any order. On a GPU a program takes one depth and the rows that are there: it reads their inputs and that
depth's factor, once for all of them, and nothing else. Where a depth has no rows its programs end at once.

Shapes: N rows, M input width, W output width, D depths, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.row_blocks import product_blocks, row_block
from fathomlm.kernels.triton_here import tl, triton

if triton is not None:
    from fathomlm.kernels.row_linear import check_rows, row_product


def add_grouped_lora(
    out_NW: Tensor, x_NM: Tensor, a_DRM: Tensor, b_DWR: Tensor, depth_N: Tensor,
    scaling: float = 1.0, inner: Tensor | None = None, gain_DW: Tensor | None = None, shift_DW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[n] = gain[depth_n] (out[n] + scaling B[depth_n] (A[depth_n] x_n)) + shift[depth_n], in place; without a gain
    (DoRA's row lengths) or a shift (a bias) where none is given. A row whose depth is negative stays as it is.
    `inner` is scratch like x for N x R numbers, made on each call where it is not given."""
    if triton is not None and x_NM.is_cuda:
        return _triton_add_grouped_lora(out_NW, x_NM, a_DRM, b_DWR, depth_N, scaling, inner, gain_DW, shift_DW)
    return plain_add_grouped_lora(out_NW, x_NM, a_DRM, b_DWR, depth_N, scaling, inner, gain_DW, shift_DW)


def plain_add_grouped_lora(
    out_NW: Tensor, x_NM: Tensor, a_DRM: Tensor, b_DWR: Tensor, depth_N: Tensor,
    scaling: float = 1.0, inner: Tensor | None = None, gain_DW: Tensor | None = None, shift_DW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning, depth by depth for all rows, since which are where is not known without waiting for a device."""
    for depth, (a_RM, b_WR) in enumerate(zip(a_DRM, b_DWR, strict=True)):
        here_N1 = (depth_N == depth)[:, None]
        out_NW += torch.where(here_N1, (x_NM @ a_RM.T) @ b_WR.T * scaling, 0.0)
        if gain_DW is not None:
            out_NW *= torch.where(here_N1, gain_DW[depth], 1.0)
        if shift_DW is not None:
            out_NW += torch.where(here_N1, shift_DW[depth], 0.0)
    return out_NW


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _grouped_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, depth_ptr, out_ptr, out_stride, gain_ptr, shift_ptr, rows, width, scaling,
        DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
        KEEP: tl.constexpr, ADD: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
    ):  # fmt: skip
        """out = scaling weight[depth] x, or out += that, times the gain and with the shift of the program's depth, for the
        rows that are there."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        group = tl.program_id(2)
        mine = tl.load(depth_ptr + row, mask=row < rows, other=-1) == group
        if tl.max(mine.to(tl.int32), 0) == 0:
            return
        weight_row = group * width + tl.minimum(column, width - 1)
        total, _ = row_product(
            x_ptr, x_stride, weight_ptr, weight_ptr, row, mine, weight_row, 0,
            DEPTH, DEPTH, BLOCK, False, KEEP, False, False,
        )  # fmt: skip
        total *= scaling
        at = out_ptr + row[:, None] * out_stride + column[None, :]
        here = mine[:, None] & (column < width)[None, :]
        if ADD:
            total += tl.load(at, mask=here, other=0.0).to(tl.float32)
        if GAIN:
            total *= tl.load(gain_ptr + weight_row).to(tl.float32)[None, :]
        if SHIFT:
            total += tl.load(shift_ptr + weight_row).to(tl.float32)[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=here)

    def _triton_add_grouped_lora(
        out_NW: Tensor, x_NM: Tensor, a_DRM: Tensor, b_DWR: Tensor, depth_N: Tensor,
        scaling: float = 1.0, inner: Tensor | None = None, gain_DW: Tensor | None = None, shift_DW: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        N, R = x_NM.shape[0], a_DRM.shape[1]
        inner_NR = x_NM.new_empty(N, R) if inner is None else inner.view(-1)[: N * R].view(N, R)
        assert depth_N.is_contiguous()
        _multiply(inner_NR, x_NM, a_DRM, depth_N, 1.0, add=False)
        _multiply(out_NW, inner_NR, b_DWR, depth_N, scaling, add=True, gain_DW=gain_DW, shift_DW=shift_DW)
        return out_NW

    def _multiply(
        out_NW: Tensor, x_NM: Tensor, weight_DWM: Tensor, depth_N: Tensor, scaling: float, *, add: bool,
        gain_DW: Tensor | None = None, shift_DW: Tensor | None = None,
    ) -> None:  # fmt: skip
        (depths, W, M), N = weight_DWM.shape, x_NM.shape[0]
        check_rows(weight_DWM, x_NM, out_NW)
        assert all(each is None or (each.is_contiguous() and each.shape == (depths, W)) for each in (gain_DW, shift_DW))
        size = weight_DWM.element_size()
        b, tall = product_blocks(N, W, M, size), row_block(N, size)
        grid = (triton.cdiv(N, tall), triton.cdiv(W, b.columns), depths)
        _grouped_kernel[grid](
            x_NM, x_NM.stride(0), weight_DWM, depth_N, out_NW, out_NW.stride(0), weight_DWM if gain_DW is None else gain_DW,
            weight_DWM if shift_DW is None else shift_DW, N, W, scaling,
            DEPTH=M, ROWS=tall, COLUMNS=b.columns, BLOCK=b.depth, KEEP=grid[0] > 1, ADD=add,
            GAIN=gain_DW is not None, SHIFT=shift_DW is not None,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
