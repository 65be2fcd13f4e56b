"""The entrance of attention for training: norm, queries, keys and values in one product, rotated; the backward pass
written out.

`norm_qkv_rope` has the meaning of `plain_norm_qkv_rope`, for weights side by side with the norm folded in (`half.folded`).
One pass over memory splits, scales and rotates the product, and one turns the three gradients back and lays them side by
side (Triton kernels on a GPU, plain torch elsewhere), so that each way there is one product instead of three narrow ones
and two additions.

Shapes: B rows, T tokens, M hidden width, H query heads, G key-value heads, D head width, W = (H + 2 G) x D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.attention import split_heads
from fathomlm.kernels.half import inverse_rms, norm_backward, weight_gradient
from fathomlm.kernels.norm import rms_norm
from fathomlm.kernels.rope import apply_rope
from fathomlm.kernels.triton_here import tl, triton

WARPS, FEW, FEW_WARPS = 1, 128, 8
"""Warps of a token, and of each of few tokens, where no other token fills the device."""

Heads = tuple[Tensor, Tensor, Tensor]


def plain_norm_qkv_rope(
    x_BTM: Tensor, norm_M: Tensor, eps: float, plus_one: bool, q_WM: Tensor, k_WM: Tensor, v_WM: Tensor,
    cos: Tensor, sin: Tensor, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The meaning: x, which goes on down the stream, and heads (B, heads, T, D) of q and k rotated, of v as they are."""
    n_BTM = rms_norm(x_BTM, norm_M, eps, plus_one)
    q, k, v = (split_heads(F.linear(n_BTM, weight), head_dim) for weight in (q_WM, k_WM, v_WM))
    return x_BTM, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def norm_qkv_rope(
    x_BTM: Tensor, eps: float, qkv_WM: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`plain_norm_qkv_rope`, for weights with the norm `folded` in, in the dtype to compute in; whole heads are rotated."""
    x, q, k, v = _NormQkvRope.apply(x_BTM, eps, qkv_WM, heads, groups, cos, sin)  # type: ignore[no-untyped-call]
    return x, q, k, v


class _NormQkvRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTM: Tensor, eps: float, qkv_WM: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale_BT1 = inverse_rms(x_BTM, eps)
        product_BTW = x_BTM.to(qkv_WM.dtype) @ qkv_WM.T
        q, k, v = rotate_and_split(product_BTW, heads, groups, cos, sin, scale_BT1.flatten())
        ctx.save_for_backward(x_BTM, scale_BT1, qkv_WM, cos, sin)
        return x_BTM.view_as(x_BTM), q, k, v

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        x_BTM, scale_BT1, qkv_WM, cos, sin = ctx.saved_tensors
        scale_N, x_NM = scale_BT1.flatten(), x_BTM.flatten(0, 1)
        d_NW = unrotate_and_pack(d_q, d_k, d_v, cos, sin, scale_N).flatten(0, 1)
        d_qkv_WM = weight_gradient(d_NW, x_NM.to(d_NW.dtype))
        d_x = norm_backward(x_NM, d_NW @ qkv_WM, d_stream.flatten(0, 1), scale_N)
        return d_x.view_as(x_BTM), None, d_qkv_WM, None, None, None, None


def rotate_and_split(product_BTW: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, scale_N: Tensor) -> Heads:
    """The packed product as heads, scaled token by token, q and k rotated by their positions. They are laid out token by
    token, heads side by side: attention's output and gradients then lie as the products around it want them."""
    D = cos.shape[-1]
    if triton is not None and product_BTW.is_cuda and D & (D - 1) == 0:  # the kernels' ranges are powers of two
        return _triton_rotate_and_split(product_BTW, heads, groups, cos, sin, scale_N)
    return plain_rotate_and_split(product_BTW, heads, groups, cos, sin, scale_N)


def plain_rotate_and_split(product_BTW: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, scale_N: Tensor) -> Heads:
    """v is a copy, since what attention keeps would otherwise hold on to the whole packed product."""
    D = cos.shape[-1]
    product_BTW = (product_BTW * scale_N.view(*product_BTW.shape[:2], 1)).to(product_BTW.dtype)
    cos_BT1D, sin_BT1D = cos.transpose(1, 2), sin.transpose(1, 2)
    parts = torch.split(product_BTW, [heads * D, groups * D, groups * D], dim=-1)
    q, k, v = (part.view(*part.shape[:-1], -1, D) for part in parts)
    turned = apply_rope(q, cos_BT1D, sin_BT1D), apply_rope(k, cos_BT1D, sin_BT1D), v
    q, k, v = (part.contiguous().transpose(1, 2) for part in turned)
    return q, k, v


def unrotate_and_pack(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, scale_N: Tensor) -> Tensor:
    """Gradients of the heads, turned back by their positions and scaled token by token, side by side as the packed
    product gave them (B, T, W)."""
    D = d_q.shape[-1]
    if triton is not None and d_q.is_cuda and D & (D - 1) == 0:
        return _triton_unrotate_and_pack(d_q, d_k, d_v, cos, sin, scale_N)
    return plain_unrotate_and_pack(d_q, d_k, d_v, cos, sin, scale_N)


def plain_unrotate_and_pack(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, scale_N: Tensor) -> Tensor:
    """The transpose of `apply_rope`: it rolls what the sines have multiplied."""
    half = cos.shape[-1] // 2
    turned = (d * cos + (d * sin).roll(half, -1) for d in (d_q, d_k))
    packed = torch.cat([d.transpose(1, 2).flatten(2) for d in (*turned, d_v)], dim=-1)
    return (packed * scale_N.view(*packed.shape[:2], 1)).to(d_q.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _turn(in_ptr, out_ptr, cos, sin, heads, scale, D: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
        """A token's heads times cos, plus their other halves times sin."""
        head = tl.arange(0, PAD)[:, None]
        column = tl.arange(0, D)[None, :]
        other = (column + D // 2) % D
        here = head < heads
        a = tl.load(in_ptr + head * D + column, mask=here).to(tl.float32)
        b = tl.load(in_ptr + head * D + other, mask=here).to(tl.float32)
        tl.store(out_ptr + head * D + column, ((a * cos + b * sin) * scale).to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _split_kernel(  # type: ignore[no-untyped-def]
        in_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, k_ptr, v_ptr, H, G,
        D: tl.constexpr, PAD_H: tl.constexpr, PAD_G: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, D)[None, :]
        cos = tl.load(cos_ptr + token * D + column).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + column).to(tl.float32)
        scale = tl.load(scale_ptr + token).to(tl.float32)
        in_ptr += token * (H + 2 * G) * D
        _turn(in_ptr, q_ptr + token * H * D, cos, sin, H, scale, D, PAD_H)
        _turn(in_ptr + H * D, k_ptr + token * G * D, cos, sin, G, scale, D, PAD_G)
        head = tl.arange(0, PAD_G)[:, None]
        v = tl.load(in_ptr + (H + G) * D + head * D + column, mask=head < G).to(tl.float32) * scale
        tl.store(v_ptr + token * G * D + head * D + column, v.to(v_ptr.dtype.element_ty), mask=head < G)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _pack_kernel(  # type: ignore[no-untyped-def]
        q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, scale_ptr, out_ptr, H, G,
        D: tl.constexpr, PAD_H: tl.constexpr, PAD_G: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, D)[None, :]
        other = (column + D // 2) % D
        cos = tl.load(cos_ptr + token * D + column).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + other).to(tl.float32)
        scale = tl.load(scale_ptr + token).to(tl.float32)
        out_ptr += token * (H + 2 * G) * D
        _turn(q_ptr + token * H * D, out_ptr, cos, sin, H, scale, D, PAD_H)
        _turn(k_ptr + token * G * D, out_ptr + H * D, cos, sin, G, scale, D, PAD_G)
        head = tl.arange(0, PAD_G)[:, None]
        v = tl.load(v_ptr + token * G * D + head * D + column, mask=head < G).to(tl.float32) * scale
        tl.store(out_ptr + (H + G) * D + head * D + column, v.to(out_ptr.dtype.element_ty), mask=head < G)

    def _warps(tokens: int) -> int:
        return WARPS if tokens > FEW else FEW_WARPS

    # Strides are never read below: while a backward pass is traced nobody knows yet how its gradients will lie in memory,
    # so a stride read now would be a guess that is compiled in. `contiguous` is traced, and holds.

    def _triton_rotate_and_split(
        product_BTW: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, scale_N: Tensor
    ) -> Heads:
        B, T, _ = product_BTW.shape
        D = cos.shape[-1]
        product_BTW = product_BTW.contiguous()
        cos, sin = (angle.expand(B, 1, T, D).contiguous() for angle in (cos, sin))
        q, k, v = (product_BTW.new_empty(B, T, n, D) for n in (heads, groups, groups))
        pads = {"PAD_H": triton.next_power_of_2(heads), "PAD_G": triton.next_power_of_2(groups)}
        _split_kernel[(B * T,)](product_BTW, cos, sin, scale_N, q, k, v, heads, groups, D=D, **pads, num_warps=_warps(B * T))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _triton_unrotate_and_pack(
        d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, scale_N: Tensor
    ) -> Tensor:
        B, H, T, D = d_q.shape
        G = d_k.shape[1]
        d_q, d_k, d_v = (d.transpose(1, 2).contiguous() for d in (d_q, d_k, d_v))
        cos, sin = (angle.expand(B, 1, T, D).contiguous() for angle in (cos, sin))
        out = d_q.new_empty(B, T, (H + 2 * G) * D)
        pads = {"PAD_H": triton.next_power_of_2(H), "PAD_G": triton.next_power_of_2(G)}
        _pack_kernel[(B * T,)](d_q, d_k, d_v, cos, sin, scale_N, out, H, G, D=D, **pads, num_warps=_warps(B * T))
        return out
