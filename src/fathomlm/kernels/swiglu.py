"""The gated feed-forward half for training: residual + down(silu(gate(x)) * up(x)), its backward pass written out.

`swiglu_mlp` has the meaning of `plain_swiglu_mlp`. It multiplies with gate and up side by side, in one product each way
instead of two and an addition, and its last product adds to the residual stream by itself. Its backward pass makes the
packed gradient and the inner activations again in one pass over memory: a Triton kernel on a GPU, plain torch elsewhere.
A compiler does not find this: it writes a packed gradient with a masked loop over both halves, twice as slowly, and
keeps the inner activations.

Shapes: N tokens, M hidden width, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton
from fathomlm.kernels.turned import turned

TURN = True
BLOCK, WARPS = 1024, 4
"""Entries of a row that a program takes, and its warps; `benchmarks/training_kernels.py` compares."""


def plain_swiglu_mlp(x_NM: Tensor, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor, residual_NM: Tensor) -> Tensor:
    """The meaning."""
    return residual_NM + F.linear(F.silu(F.linear(x_NM, gate_IM)) * F.linear(x_NM, up_IM), down_MI)


def swiglu_mlp(x_NM: Tensor, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor, residual_NM: Tensor) -> Tensor:
    """`plain_swiglu_mlp`, in autocast's dtype where that is on."""
    kind = x_NM.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_NM.dtype
    out: Tensor = _SwigluMlp.apply(x_NM.to(dtype), gate_IM, up_IM, down_MI, residual_NM.to(dtype))  # type: ignore[no-untyped-call]
    return out


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NM: Tensor, gate_IM: Tensor, up_IM: Tensor, down_MI: Tensor, residual_NM: Tensor) -> Tensor:
        packed = torch.cat((gate_IM, up_IM)).to(x_NM.dtype)
        both_N2I = x_NM @ packed.T
        gate, up = both_N2I.chunk(2, dim=-1)
        ctx.save_for_backward(x_NM, both_N2I, gate_IM, up_IM, down_MI)
        return torch.addmm(residual_NM, F.silu(gate) * up, down_MI.to(x_NM.dtype).T)

    @staticmethod
    def backward(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor, ...]:
        x_NM, both_N2I, gate_IM, up_IM, down_MI = ctx.saved_tensors
        dtype = x_NM.dtype
        d_inner_NI = d_out_NM @ down_MI.to(dtype)
        d_both_N2I, inner_NI = swiglu_backward(both_N2I, d_inner_NI)
        d_down_MI = d_out_NM.T @ inner_NI
        d_packed = (d_both_N2I.T @ x_NM).to(gate_IM.dtype)
        d_x = d_both_N2I @ (turned([gate_IM, up_IM], dtype).T if TURN else torch.cat((gate_IM, up_IM)).to(dtype))
        d_gate, d_up = d_packed.chunk(2)
        return d_x, d_gate, d_up, d_down_MI.to(down_MI.dtype), d_out_NM


def swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient for [gate, up], packed as they are, and silu(gate) * up again."""
    if triton is not None and both_N2I.is_cuda:
        return _triton_swiglu_backward(both_N2I, d_inner_NI)
    return plain_swiglu_backward(both_N2I, d_inner_NI)


def plain_swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(both_N2I.dtype, torch.float32)
    gate, up = (half.to(wide) for half in both_N2I.chunk(2, dim=-1))
    d_inner = d_inner_NI.to(wide)
    sigmoid = gate.sigmoid()
    swished = gate * sigmoid
    d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    packed = torch.cat((d_gate, d_inner * swished), dim=-1).to(both_N2I.dtype)
    return packed, (swished * up).to(both_N2I.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _swiglu_backward_kernel(both_ptr, d_inner_ptr, d_both_ptr, inner_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = column < width
        narrow, left = row * width + column, 2 * row * width + column
        gate = tl.load(both_ptr + left, mask=here).to(tl.float32)
        up = tl.load(both_ptr + left + width, mask=here).to(tl.float32)
        d_inner = tl.load(d_inner_ptr + narrow, mask=here).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        swished = gate * sigmoid
        d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        kind = d_both_ptr.dtype.element_ty
        tl.store(d_both_ptr + left, d_gate.to(kind), mask=here)
        tl.store(d_both_ptr + left + width, (d_inner * swished).to(kind), mask=here)
        tl.store(inner_ptr + narrow, (swished * up).to(kind), mask=here)

    def _triton_swiglu_backward(both_N2I: Tensor, d_inner_NI: Tensor) -> tuple[Tensor, Tensor]:
        both_N2I, d_inner_NI = both_N2I.contiguous(), d_inner_NI.contiguous()
        d_both, inner = torch.empty_like(both_N2I), torch.empty_like(d_inner_NI)
        rows, width = d_inner_NI.shape
        grid = (rows, triton.cdiv(width, BLOCK))
        _swiglu_backward_kernel[grid](both_N2I, d_inner_NI, d_both, inner, width, BLOCK=BLOCK, num_warps=WARPS)
        return d_both, inner
