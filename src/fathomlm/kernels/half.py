"""What both halves of a layer share in their training forms: the norm at their entrance, and its way back.

A half begins with n = w * x * s, s the inverse root mean square of each token, and weights W that n is multiplied with.
The forms never write n down. Its weight w is folded into W, once for all tokens; x is multiplied with that, and whoever
reads the product scales it by s, token by token:

    n W^T = s (x V^T)                       V = W diag(w)
    the folded weights' gradient            (s d)^T x, d the product's gradient; a kernel writes s d anyway
    the stream's                            d_x = p - x s mean(p x s) + what comes down the stream,  p = (s d) V

So a half keeps x and s, and neither it nor its backward pass moves a norm through memory. What W and w get of V's gradient
follows from `folded` by the chain rule, once for all uses of a looped layer.

Shapes: N tokens, M hidden width, W rows of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton

GROUP, WARPS = 2, 4
"""Tokens that a program of the kernel takes, and its warps. `benchmarks/training_kernels.py` compares."""


def keeps_gradients(x: Tensor) -> bool:
    """Whether the compiler can be trusted with functions whose backward pass is written out. In float32 on a GPU, where no
    one looks for speed, torch 2.11 compiles their forward passes but drops the gradient between two of them (found by
    `tests/gpu/test_training.py`)."""
    return not (x.is_cuda and x.dtype == torch.float32)


def effective_weight(weight_M: Tensor, plus_one: bool) -> Tensor:
    """The norm's weight in float32 at least, also where it is stored in bfloat16 (FSDP's copies)."""
    wide = weight_M.to(torch.promote_types(weight_M.dtype, torch.float32))
    return 1 + wide if plus_one else wide


def folded(weights: Sequence[Tensor], norm_M: Tensor, plus_one: bool, dtype: torch.dtype) -> Tensor:
    """V: weights (W, M) that read one norm, one below the other, with the norm's own weight multiplied in."""
    out: Tensor = _Folded.apply(effective_weight(norm_M, plus_one), dtype, *weights)  # type: ignore[no-untyped-call]
    return out


class _Folded(torch.autograd.Function):
    """Written out so that it keeps what is there anyway, the weights as they are, and no float32 copy of them together."""

    @staticmethod
    def forward(ctx: Any, norm_M: Tensor, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(norm_M, *weights)
        return (torch.cat(weights) * norm_M).to(dtype)

    @staticmethod
    def backward(ctx: Any, d_WM: Tensor) -> tuple[Tensor | None, ...]:
        norm_M, *weights = ctx.saved_tensors
        parts = torch.split(d_WM, [weight.shape[0] for weight in weights])
        d_norm = torch.stack([(part.to(norm_M.dtype) * weight).sum(0) for part, weight in zip(parts, weights, strict=True)])
        d_weights = [(part.to(norm_M.dtype) * norm_M).to(w.dtype) for part, w in zip(parts, weights, strict=True)]
        return d_norm.sum(0), None, *d_weights


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """s (..., 1), in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def half_dtype(x: Tensor) -> torch.dtype:
    """What a half computes in: autocast's dtype where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


FEW_TERMS, MANY_TERMS, NARROW = 2**13, 2**15, 2048


def weight_gradient(d_NW: Tensor, x_NM: Tensor) -> Tensor:
    """d^T x (W, M). For a narrow weight and between some and many tokens, as a routed recursion has them, cuBLAS 13 cuts
    the sum into too few programs: halved by hand it takes 111 us instead of 131 (24,576 tokens, 1600 x 960, H200)."""
    N, W = d_NW.shape
    if not d_NW.is_cuda or N % 2 or not FEW_TERMS < N < MANY_TERMS or W > NARROW:
        return d_NW.T @ x_NM
    return halved_product(d_NW, x_NM)


def halved_product(d_NW: Tensor, x_NM: Tensor) -> Tensor:
    """d^T x, the sum over an even number of tokens in two halves."""
    (N, W), M = d_NW.shape, x_NM.shape[1]
    return torch.bmm(d_NW.reshape(2, N // 2, W).transpose(1, 2), x_NM.reshape(2, N // 2, M)).sum(0)


def norm_backward(x_NM: Tensor, pull_NM: Tensor, d_stream_NM: Tensor, scale_N: Tensor) -> Tensor:
    """The gradient for x: through the norm (`pull_NM` is p above) and down the residual stream."""
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_backward(x_NM, pull_NM, d_stream_NM, scale_N)
    return plain_norm_backward(x_NM, pull_NM, d_stream_NM, scale_N)


def plain_norm_backward(x_NM: Tensor, pull_NM: Tensor, d_stream_NM: Tensor, scale_N: Tensor) -> Tensor:
    wide = scale_N.dtype
    unit, pull = x_NM.to(wide) * scale_N[:, None], pull_NM.to(wide)
    return (pull - unit * (pull * unit).mean(-1, keepdim=True) + d_stream_NM.to(wide)).to(x_NM.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_backward_kernel(  # type: ignore[no-untyped-def]
        x_ptr, pull_ptr, stream_ptr, scale_ptr, d_x_ptr, tokens, width, GROUP: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        here = (column < width) & (row < tokens)
        at = row * width + column
        scale = tl.load(scale_ptr + row, mask=row < tokens, other=0.0).to(tl.float32)
        unit = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32) * scale
        pull = tl.load(pull_ptr + at, mask=here, other=0.0).to(tl.float32)
        d_stream = tl.load(stream_ptr + at, mask=here, other=0.0).to(tl.float32)
        d_x = pull - unit * (tl.sum(pull * unit, 1)[:, None] / width) + d_stream
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=here)

    def _triton_norm_backward(x_NM: Tensor, pull_NM: Tensor, d_stream_NM: Tensor, scale_N: Tensor) -> Tensor:
        x_NM, pull_NM, d_stream_NM = x_NM.contiguous(), pull_NM.contiguous(), d_stream_NM.contiguous()
        tokens, width = x_NM.shape
        d_x = torch.empty_like(x_NM)
        _norm_backward_kernel[(triton.cdiv(tokens, GROUP),)](
            x_NM, pull_NM, d_stream_NM, scale_N, d_x, tokens, width,
            GROUP=GROUP, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
        return d_x
