"""Queries, keys and values of one input for training: one product, rotated, with the backward pass written out.

`qkv_rope` has the meaning of `plain_qkv_rope`. Its backward pass turns the three gradients back and lays them side by side
in one pass over memory (a Triton kernel on a GPU, plain torch elsewhere), so that each way there is one product instead
of three narrow ones and two additions.

Shapes: B rows, T tokens, M hidden width, H query heads, G key-value heads, D head width, W = (H + 2 G) x D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.rope import apply_rope
from fathomlm.kernels.triton_here import tl, triton
from fathomlm.kernels.turned import turned

TURN = True
WARPS = 1


def plain_qkv_rope(
    x_BTM: Tensor, q_WM: Tensor, k_WM: Tensor, v_WM: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning: heads (B, heads, T, D) of q and k rotated, of v as they are."""
    q, k, v = (_heads(F.linear(x_BTM, weight), head_dim) for weight in (q_WM, k_WM, v_WM))
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def qkv_rope(
    x_BTM: Tensor, q_WM: Tensor, k_WM: Tensor, v_WM: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_qkv_rope`, in autocast's dtype where that is on; the whole head is rotated."""
    kind = x_BTM.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTM.dtype
    q, k, v = _QkvRope.apply(x_BTM.to(dtype), q_WM, k_WM, v_WM, cos, sin, head_dim)  # type: ignore[no-untyped-call]
    return q, k, v


class _QkvRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTM: Tensor, q_WM: Tensor, k_WM: Tensor, v_WM: Tensor, cos: Tensor, sin: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        widths = [weight.shape[0] for weight in (q_WM, k_WM, v_WM)]
        packed = torch.cat((q_WM, k_WM, v_WM)).to(x_BTM.dtype)
        q, k, v = (part.view(*part.shape[:-1], -1, head_dim) for part in torch.split(x_BTM @ packed.T, widths, dim=-1))
        ctx.save_for_backward(x_BTM, q_WM, k_WM, v_WM, cos, sin)
        # Rotated token by token, heads side by side: attention's output and gradients then lie as the products around it
        # want them. A copy of v, since what attention keeps would otherwise hold on to the whole packed product.
        cos_BT1D, sin_BT1D = cos.transpose(1, 2), sin.transpose(1, 2)
        turned = apply_rope(q, cos_BT1D, sin_BT1D), apply_rope(k, cos_BT1D, sin_BT1D), v
        q, k, v = (heads.contiguous().transpose(1, 2) for heads in turned)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        x_BTM, q_WM, k_WM, v_WM, cos, sin = ctx.saved_tensors
        widths = [weight.shape[0] for weight in (q_WM, k_WM, v_WM)]
        d_packed_BTW = unrotate_and_pack(d_q, d_k, d_v, cos, sin)
        d_weight = (d_packed_BTW.flatten(0, 1).T @ x_BTM.flatten(0, 1)).to(q_WM.dtype)
        d_x = d_packed_BTW @ (
            turned([q_WM, k_WM, v_WM], x_BTM.dtype).T if TURN else torch.cat((q_WM, k_WM, v_WM)).to(x_BTM.dtype)
        )
        return (d_x, *torch.split(d_weight, widths), None, None, None)


def unrotate_and_pack(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of the heads, turned back by their positions, side by side as the packed product gave them (B, T, W)."""
    D = d_q.shape[-1]
    if triton is not None and d_q.is_cuda and D & (D - 1) == 0:  # the kernel's ranges are powers of two
        return _triton_unrotate_and_pack(d_q, d_k, d_v, cos, sin)
    return plain_unrotate_and_pack(d_q, d_k, d_v, cos, sin)


def plain_unrotate_and_pack(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of `apply_rope`: it rolls what the sines have multiplied."""
    half = cos.shape[-1] // 2
    turned = (d * cos + (d * sin).roll(half, -1) for d in (d_q, d_k))
    return torch.cat([d.transpose(1, 2).flatten(2) for d in (*turned, d_v)], dim=-1)


def _heads(x_BTW: Tensor, head_dim: int) -> Tensor:
    return x_BTW.view(*x_BTW.shape[:-1], -1, head_dim).transpose(1, 2)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _turn_back(d_ptr, out_ptr, cos, sin, heads, D: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
        head = tl.arange(0, PAD)[:, None]
        column = tl.arange(0, D)[None, :]
        other = (column + D // 2) % D
        here = head < heads
        d = tl.load(d_ptr + head * D + column, mask=here).to(tl.float32)
        e = tl.load(d_ptr + head * D + other, mask=here).to(tl.float32)
        tl.store(out_ptr + head * D + column, (d * cos + e * sin).to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _pack_kernel(  # type: ignore[no-untyped-def]
        q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, H, G, D: tl.constexpr, PAD_H: tl.constexpr, PAD_G: tl.constexpr
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, D)[None, :]
        other = (column + D // 2) % D
        cos = tl.load(cos_ptr + token * D + column).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + other).to(tl.float32)
        out_ptr += token * (H + 2 * G) * D
        _turn_back(q_ptr + token * H * D, out_ptr, cos, sin, H, D, PAD_H)
        _turn_back(k_ptr + token * G * D, out_ptr + H * D, cos, sin, G, D, PAD_G)
        head = tl.arange(0, PAD_G)[:, None]
        v = tl.load(v_ptr + token * G * D + head * D + column, mask=head < G)
        tl.store(out_ptr + (H + G) * D + head * D + column, v, mask=head < G)

    def _triton_unrotate_and_pack(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Strides are never read here: while a backward pass is traced nobody knows yet how its gradients will lie in
        memory, so a stride read now would be a guess that is compiled in. `contiguous` is traced, and holds."""
        B, H, T, D = d_q.shape
        G = d_k.shape[1]
        d_q, d_k, d_v = (d.transpose(1, 2).contiguous() for d in (d_q, d_k, d_v))
        cos, sin = (angle.expand(B, 1, T, D).contiguous() for angle in (cos, sin))
        out = d_q.new_empty(B, T, (H + 2 * G) * D)
        pads = {"PAD_H": triton.next_power_of_2(H), "PAD_G": triton.next_power_of_2(G)}
        _pack_kernel[(B * T,)](d_q, d_k, d_v, cos, sin, out, H, G, D=D, **pads, num_warps=WARPS)
        return out
