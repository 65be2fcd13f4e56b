"""Where the residual stream forks, for training: x goes on, and its root-mean-square norm goes into a layer's half.

Both branches meet again in the backward pass. `rms_norm_fork` adds their gradients, takes the norm's, and sums up the
weight's in one pass over memory (a Triton kernel on a GPU, plain torch elsewhere).

Shapes: N tokens, M hidden width, P programs of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fathomlm.kernels.norm import rms_norm
from fathomlm.kernels.triton_here import tl, triton

PROGRAMS, GROUP, WARPS = 1056, 1, 4
"""Programs of the kernel, each with a run of rows and one partial sum for the weight; rows that it takes at once, and its
warps. `benchmarks/training_kernels.py` compares."""


def plain_rms_norm_fork(x: Tensor, weight_M: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The meaning."""
    return x, rms_norm(x, weight_M, eps, plus_one)


def rms_norm_fork(x: Tensor, weight_M: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """`plain_rms_norm_fork`, in float32 at least also where the weight is bfloat16 (FSDP's copies); the normed branch has
    the dtype of x."""
    wide_M = weight_M.to(torch.promote_types(weight_M.dtype, torch.float32))
    weight = 1 + wide_M if plus_one else wide_M
    stream, normed = _RmsNormFork.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return stream, normed


class _RmsNormFork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.to(weight_M.dtype)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight_M, scale)
        return x.view_as(x), (weight_M * (wide * scale)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_normed: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_M, scale = ctx.saved_tensors
        width = x.shape[-1]
        x_NM, d_normed_NM, d_stream_NM = (t.reshape(-1, width) for t in (x, d_normed, d_stream))
        d_x, d_weight = norm_fork_backward(x_NM, d_normed_NM, d_stream_NM, weight_M, scale.reshape(-1))
        return d_x.view_as(x), d_weight, None


def norm_fork_backward(
    x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients for x, both branches added, and for the weight."""
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_fork_backward(x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N)
    return plain_norm_fork_backward(x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N)


def plain_norm_fork_backward(
    x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    wide = weight_M.dtype
    scale = scale_N[:, None]
    unit = x_NM.to(wide) * scale
    d_normed = d_normed_NM.to(wide)
    pull = d_normed * weight_M
    d_x = (pull - unit * (pull * unit).mean(-1, keepdim=True)) * scale + d_stream_NM.to(wide)
    return d_x.to(x_NM.dtype), (d_normed * unit).sum(0)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_fork_kernel(  # type: ignore[no-untyped-def]
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
            unit = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32) * scale
            d_normed = tl.load(normed_ptr + at, mask=here, other=0.0).to(tl.float32)
            d_stream = tl.load(stream_ptr + at, mask=here, other=0.0).to(tl.float32)
            pull = d_normed * weight
            d_x = (pull - unit * (tl.sum(pull * unit, 1)[:, None] / width)) * scale + d_stream
            tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=here)
            d_weight += d_normed * unit
        total = tl.sum(d_weight, 0)[None, :]
        tl.store(partial_ptr + tl.program_id(0) * width + column, total, mask=inside)

    def _triton_norm_fork_backward(
        x_NM: Tensor, d_normed_NM: Tensor, d_stream_NM: Tensor, weight_M: Tensor, scale_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_NM, d_normed_NM, d_stream_NM = x_NM.contiguous(), d_normed_NM.contiguous(), d_stream_NM.contiguous()
        tokens, width = x_NM.shape
        rows = GROUP * triton.cdiv(tokens, GROUP * PROGRAMS)
        programs = triton.cdiv(tokens, rows)
        d_x = torch.empty_like(x_NM)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x_NM.device)
        _norm_fork_kernel[(programs,)](
            x_NM, d_normed_NM, d_stream_NM, weight_M, scale_N, d_x, partial, tokens, width,
            ROWS=rows, GROUP=GROUP, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
        return d_x, partial.sum(0).to(weight_M.dtype)
