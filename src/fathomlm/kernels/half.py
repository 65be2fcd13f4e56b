"""What both halves of a layer share in their training forms: the norm at their entrance, and its way back.

A half begins with n = w * x * s, s the inverse root mean square of each token. The forms keep x and s but not n: n is
multiplied with weights in the forward pass and let go. Its two uses in the backward pass do without it:

    the weights' gradient   d^T n = (s d)^T x * w, so x takes the place of n, and s goes into d
    the norm's own          with d_n' = s d_n, which (s d) W gives as it is:
                            d_x = d_n' w - x s mean(d_n' w x s) + what comes down the residual stream,  d_w = sum d_n' x

Scaling d by s costs nothing, since a kernel writes d anyway; what is saved is a sixth of all that a layer keeps.

Shapes: N tokens, M hidden width, P programs of the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton

PROGRAMS, GROUP, WARPS = 1056, 1, 4
"""Programs of the kernel, each with a run of rows and one partial sum for the weight; rows that it takes at once, and its
warps. `benchmarks/training_kernels.py` compares."""


def keeps_gradients(x: Tensor) -> bool:
    """Whether the compiler can be trusted with functions whose backward pass is written out. In float32 on a GPU, where no
    one looks for speed, torch 2.11 compiles their forward passes but drops the gradient between two of them (found by
    `tests/gpu/test_training.py`)."""
    return not (x.is_cuda and x.dtype == torch.float32)


def effective_weight(weight_M: Tensor, plus_one: bool) -> Tensor:
    """The norm's weight in float32 at least, also where it is stored in bfloat16 (FSDP's copies)."""
    wide = weight_M.to(torch.promote_types(weight_M.dtype, torch.float32))
    return 1 + wide if plus_one else wide


def normed(x: Tensor, weight_M: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """n, and s (..., 1) in the weight's dtype."""
    wide = x.to(weight_M.dtype)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_M * (wide * scale)).to(dtype), scale


def weight_gradient(d_NW: Tensor, x_NM: Tensor, norm_M: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient (W, M) of weights behind a norm; `d_NW` is scaled by s."""
    return ((d_NW.T @ x_NM).to(norm_M.dtype) * norm_M).to(dtype)


def norm_backward(
    x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients for x, norm and residual stream added, and for the norm's weight. `d_normed_NM` is scaled by s."""
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_backward(x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N)
    return plain_norm_backward(x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N)


def plain_norm_backward(
    x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    wide = weight_M.dtype
    x, d_normed = x_NM.to(wide), d_normed_NM.to(wide)
    unit = x * scale_N[:, None]
    pull = d_normed * weight_M
    d_x = pull - unit * (pull * unit).mean(-1, keepdim=True) + d_stream_NM.to(wide)
    return d_x.to(x_NM.dtype), (d_normed * x).sum(0)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_backward_kernel(  # type: ignore[no-untyped-def]
        x_ptr, normed_ptr, stream_ptr, weight_ptr, scale_ptr, d_x_ptr, partial_ptr,
        tokens, width, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0).to(tl.int64) * ROWS
        column = tl.arange(0, BLOCK)[None, :]
        inside = column < width
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        d_weight = tl.zeros((GROUP, BLOCK), tl.float32)
        for i in range(0, ROWS, GROUP):
            row = first + i + tl.arange(0, GROUP)[:, None]
            here = inside & (row < tokens)
            at = row * width + column
            scale = tl.load(scale_ptr + row, mask=row < tokens, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
            d_normed = tl.load(normed_ptr + at, mask=here, other=0.0).to(tl.float32)
            d_stream = tl.load(stream_ptr + at, mask=here, other=0.0).to(tl.float32)
            pull = d_normed * weight
            unit = x * scale
            d_x = pull - unit * (tl.sum(pull * unit, 1)[:, None] / width) + d_stream
            tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=here)
            d_weight += d_normed * x
        total = tl.sum(d_weight, 0)[None, :]
        tl.store(partial_ptr + tl.program_id(0) * width + column, total, mask=inside)

    def _triton_norm_backward(
        x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_NM, d_normed_NM, d_stream_NM = x_NM.contiguous(), d_normed_NM.contiguous(), d_stream_NM.contiguous()
        tokens, width = x_NM.shape
        rows = GROUP * triton.cdiv(tokens, GROUP * PROGRAMS)
        programs = triton.cdiv(tokens, rows)
        d_x = torch.empty_like(x_NM)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x_NM.device)
        _norm_backward_kernel[(programs,)](
            x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N, d_x, partial, tokens, width,
            ROWS=rows, GROUP=GROUP, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
        return d_x, partial.sum(0).to(weight_M.dtype)
