"""The gated feed-forward half for training: x + down(silu(gate(n)) * up(n)), n the norm of x, its backward pass written out.

`norm_swiglu_mlp` has the meaning of `plain_norm_swiglu_mlp`. It multiplies with gate and up side by side, in one product
each way instead of two and an addition, and its last product adds to the residual stream by itself. Its backward pass
makes the packed gradient and the inner activations again in one pass over memory: a Triton kernel on a GPU, plain torch
elsewhere. A compiler does not find this: it writes a packed gradient with a masked loop over both halves, twice as slowly,
and keeps the inner activations.

Shapes: N tokens, M hidden width, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.half import effective_weight, norm_backward, normed, weight_gradient
from fathomlm.kernels.norm import rms_norm
from fathomlm.kernels.triton_here import tl, triton

BLOCK, WARPS = 1024, 4
"""Entries of a row that a program takes, and its warps; `benchmarks/training_kernels.py` compares."""


def plain_norm_swiglu_mlp(
    x_NM: Tensor, norm_M: Tensor, eps: float, plus_one: bool, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor
) -> Tensor:
    """The meaning."""
    n_NM = rms_norm(x_NM, norm_M, eps, plus_one)
    return x_NM + F.linear(F.silu(F.linear(n_NM, gate_IM)) * F.linear(n_NM, up_IM), down_MI)


def norm_swiglu_mlp(
    x_NM: Tensor, norm_M: Tensor, eps: float, plus_one: bool, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor
) -> Tensor:
    """`plain_norm_swiglu_mlp`, in autocast's dtype where that is on."""
    kind = x_NM.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_NM.dtype
    weight = effective_weight(norm_M, plus_one)
    out: Tensor = _NormSwigluMlp.apply(x_NM.to(dtype), weight, eps, gate_IM, up_IM, down_MI)  # type: ignore[no-untyped-call]
    return out


class _NormSwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NM: Tensor, norm_M: Tensor, eps: float, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor
    ) -> Tensor:
        n_NM, scale_N1 = normed(x_NM, norm_M, eps, x_NM.dtype)
        both_N2I = n_NM @ torch.cat((gate_IM, up_IM)).to(x_NM.dtype).T
        gate, up = both_N2I.chunk(2, dim=-1)
        ctx.save_for_backward(x_NM, norm_M, scale_N1, both_N2I, gate_IM, up_IM, down_MI)
        return torch.addmm(x_NM, F.silu(gate) * up, down_MI.to(x_NM.dtype).T)

    @staticmethod
    def backward(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NM, norm_M, scale_N1, both_N2I, gate_IM, up_IM, down_MI = ctx.saved_tensors
        dtype, scale_N = x_NM.dtype, scale_N1.flatten()
        d_inner_NI = d_out_NM @ down_MI.to(dtype)
        d_both_N2I, inner_NI = swiglu_backward(both_N2I, d_inner_NI, scale_N)
        d_down_MI = (d_out_NM.T @ inner_NI).to(down_MI.dtype)
        d_gate, d_up = weight_gradient(d_both_N2I, x_NM, norm_M, gate_IM.dtype).chunk(2)
        d_normed_NM = d_both_N2I @ torch.cat((gate_IM, up_IM)).to(dtype)
        d_x, d_norm = norm_backward(x_NM, d_normed_NM, d_out_NM, norm_M, scale_N)
        return d_x, d_norm, None, d_gate, d_up, d_down_MI


def swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient for [gate, up], packed as they are and scaled token by token, and silu(gate) * up again."""
    if triton is not None and both_N2I.is_cuda:
        return _triton_swiglu_backward(both_N2I, d_inner_NI, scale_N)
    return plain_swiglu_backward(both_N2I, d_inner_NI, scale_N)


def plain_swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(both_N2I.dtype, torch.float32)
    gate, up = (half.to(wide) for half in both_N2I.chunk(2, dim=-1))
    d_inner = d_inner_NI.to(wide) * scale_N[:, None]
    sigmoid = gate.sigmoid()
    swished = gate * sigmoid
    d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    packed = torch.cat((d_gate, d_inner * swished), dim=-1).to(both_N2I.dtype)
    return packed, (swished * up).to(both_N2I.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _swiglu_backward_kernel(both_ptr, d_inner_ptr, scale_ptr, d_both_ptr, inner_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = column < width
        narrow, left = row * width + column, 2 * row * width + column
        gate = tl.load(both_ptr + left, mask=here).to(tl.float32)
        up = tl.load(both_ptr + left + width, mask=here).to(tl.float32)
        scale = tl.load(scale_ptr + row).to(tl.float32)
        d_inner = tl.load(d_inner_ptr + narrow, mask=here).to(tl.float32) * scale
        sigmoid = tl.sigmoid(gate)
        swished = gate * sigmoid
        d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        kind = d_both_ptr.dtype.element_ty
        tl.store(d_both_ptr + left, d_gate.to(kind), mask=here)
        tl.store(d_both_ptr + left + width, (d_inner * swished).to(kind), mask=here)
        tl.store(inner_ptr + narrow, (swished * up).to(kind), mask=here)

    def _triton_swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
        both_N2I, d_inner_NI = both_N2I.contiguous(), d_inner_NI.contiguous()
        d_both, inner = torch.empty_like(both_N2I), torch.empty_like(d_inner_NI)
        rows, width = d_inner_NI.shape
        grid = (rows, triton.cdiv(width, BLOCK))
        _swiglu_backward_kernel[grid](both_N2I, d_inner_NI, scale_N, d_both, inner, width, BLOCK=BLOCK, num_warps=WARPS)
        return d_both, inner
