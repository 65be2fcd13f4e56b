"""The gated feed-forward half for training: x + down(silu(gate(n)) * up(n)), n the norm of x, its backward pass written out.

`norm_swiglu_mlp` has the meaning of `plain_norm_swiglu_mlp`. It multiplies with gate and up side by side, the norm folded
in (`half.folded`): one product each way instead of two and an addition. Its last product adds itself to a copy of the
residual stream. Its backward pass makes the packed gradient, and the inner activations again if they were not kept, in one
pass over memory: a Triton kernel on a GPU, plain torch elsewhere. A compiler does not find this: it writes a packed
gradient with a masked loop over both halves, twice as slowly.

Shapes: N tokens, M hidden width, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.gates import gated
from fathomlm.kernels.half import inverse_rms, norm_backward
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


def norm_swiglu_mlp(x_NM: Tensor, eps: float, both_2IM: Tensor, down_MI: Tensor, keep_inner: bool = True) -> Tensor:
    """`plain_norm_swiglu_mlp`, for gate and up with the norm `folded` in. All weights are in the dtype to compute in.
    Without `keep_inner` the backward pass makes the inner activations again."""
    x_NM = x_NM.to(down_MI.dtype)
    out: Tensor = _NormSwigluMlp.apply(x_NM, eps, both_2IM, down_MI, keep_inner)  # type: ignore[no-untyped-call]
    return out


class _NormSwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NM: Tensor, eps: float, both_2IM: Tensor, down_MI: Tensor, keep_inner: bool) -> Tensor:
        scale_N1 = inverse_rms(x_NM, eps)
        product_N2I = x_NM @ both_2IM.T
        inner_NI = gated(product_N2I, scale_N1, "silu")
        ctx.save_for_backward(x_NM, scale_N1, product_N2I, both_2IM, down_MI, inner_NI if keep_inner else None)
        out_NM = x_NM.clone()
        add_product_(out_NM, inner_NI, down_MI.T)
        return out_NM

    @staticmethod
    def backward(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NM, scale_N1, product_N2I, both_2IM, down_MI, inner_NI = ctx.saved_tensors
        scale_N = scale_N1.flatten()
        d_inner_NI = d_out_NM @ down_MI
        d_product_N2I, again_NI = swiglu_backward(product_N2I, d_inner_NI, scale_N, again=inner_NI is None)
        d_down_MI = d_out_NM.T @ (inner_NI if again_NI is None else again_NI)
        d_both_2IM = d_product_N2I.T @ x_NM
        d_x = norm_backward(x_NM, d_product_N2I @ both_2IM, d_out_NM, scale_N)
        return d_x, None, d_both_2IM, d_down_MI, None


@torch.library.custom_op("fathomlm::add_product_", mutates_args={"total_NM"})
def add_product_(total_NM: Tensor, a_NI: Tensor, b_IM: Tensor) -> None:
    """total += a @ b, in its own place. `addmm` as a function makes the copy by itself; in front of this one it is written
    by the kernel that reads the stream for its norm."""
    torch.addmm(total_NM, a_NI, b_IM, out=total_NM)


def swiglu_backward(
    product_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor, again: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The gradient for the product, and the inner activations `again`."""
    if triton is not None and product_N2I.is_cuda:
        return _triton_swiglu_backward(product_N2I, d_inner_NI, scale_N, again)
    return plain_swiglu_backward(product_N2I, d_inner_NI, scale_N, again)


def plain_swiglu_backward(
    product_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor, again: bool = True
) -> tuple[Tensor, Tensor | None]:
    wide, scale_N1 = scale_N.dtype, scale_N[:, None]
    gate, up = (half.to(wide) * scale_N1 for half in product_N2I.chunk(2, dim=-1))
    d_inner = d_inner_NI.to(wide) * scale_N1
    sigmoid = gate.sigmoid()
    swished = gate * sigmoid
    d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    packed = torch.cat((d_gate, d_inner * swished), dim=-1).to(product_N2I.dtype)
    return packed, (swished * up).to(product_N2I.dtype) if again else None


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
        product_ptr, d_inner_ptr, scale_ptr, d_product_ptr, inner_ptr, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = column < width
        narrow, left = row * width + column, 2 * row * width + column
        scale = tl.load(scale_ptr + row).to(tl.float32)
        gate = tl.load(product_ptr + left, mask=here).to(tl.float32) * scale
        up = tl.load(product_ptr + left + width, mask=here).to(tl.float32) * scale
        d_inner = tl.load(d_inner_ptr + narrow, mask=here).to(tl.float32) * scale
        sigmoid = tl.sigmoid(gate)
        swished = gate * sigmoid
        d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        kind = d_product_ptr.dtype.element_ty
        tl.store(d_product_ptr + left, d_gate.to(kind), mask=here)
        tl.store(d_product_ptr + left + width, (d_inner * swished).to(kind), mask=here)
        if AGAIN:
            tl.store(inner_ptr + narrow, (swished * up).to(kind), mask=here)

    def _triton_swiglu_backward(
        product_N2I: Tensor, d_inner_NI: Tensor, scale_N: Tensor, again: bool
    ) -> tuple[Tensor, Tensor | None]:
        product_N2I, d_inner_NI = product_N2I.contiguous(), d_inner_NI.contiguous()
        d_product = torch.empty_like(product_N2I)
        inner = torch.empty_like(d_inner_NI if again else d_inner_NI[:1])  # never written where it is not wanted
        rows, width = d_inner_NI.shape
        grid = (rows, triton.cdiv(width, BLOCK))
        _swiglu_backward_kernel[grid](
            product_N2I, d_inner_NI, scale_N, d_product, inner, width, AGAIN=again, BLOCK=BLOCK, num_warps=WARPS
        )
        return d_product, inner if again else None
