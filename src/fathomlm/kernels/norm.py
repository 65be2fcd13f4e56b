"""Root-mean-square norm, in float32 whatever the input's dtype, as every family here does it; and for decoding rows one
between a half of a layer and the stream.

Shapes: N rows, M hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathomlm.kernels.triton_here import early_launch, tl, triton

if triton is not None:
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """x / rms(x) * weight; Gemma stores weight - 1 and multiplies before it rounds back to the input's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight; `plus_one` for families that store weight - 1 (Gemma)."""

    def __init__(self, width: int, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.plus_one = plus_one

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight) if self.plus_one else nn.init.ones_(self.weight)

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        """`offset` is what a step adds to the shared weight."""
        weight = self.weight if offset is None else self.weight + offset
        return rms_norm(x, weight, self.eps, self.plus_one)


def add_norm(stream_NM: Tensor, branch_NM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
    """stream + weight * branch / rms(branch), where the stream lies. The weight is what is multiplied with, in float32."""
    if triton is not None and stream_NM.is_cuda:
        return _triton_add_norm(stream_NM, branch_NM, weight_M, eps)
    return plain_add_norm(stream_NM, branch_NM, weight_M, eps)


def plain_add_norm(stream_NM: Tensor, branch_NM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
    """The meaning."""
    return stream_NM.add_(rms_norm(branch_NM.float(), weight_M, eps, plus_one=False).to(stream_NM.dtype))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _add_norm_kernel(  # type: ignore[no-untyped-def]
        stream_ptr, stream_stride, branch_ptr, branch_stride, weight_ptr, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        let_next_start(EARLY)
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
        here = column < WIDTH
        weight = tl.load(weight_ptr + column, mask=here, other=0.0)
        wait_for_last(EARLY)
        branch = tl.load(branch_ptr + row * branch_stride + column, mask=here, other=0.0).to(tl.float32)
        at = stream_ptr + row * stream_stride + column
        stream = tl.load(at, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(branch * branch, 0) / WIDTH + eps)
        tl.store(at, (stream + weight * branch * scale).to(stream_ptr.dtype.element_ty), mask=here)

    def _triton_add_norm(stream_NM: Tensor, branch_NM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        N, M = stream_NM.shape
        assert stream_NM.stride(1) == branch_NM.stride(1) == weight_M.stride(0) == 1
        wide = triton.next_power_of_2(M)
        _add_norm_kernel[(N,)](
            stream_NM, stream_NM.stride(0), branch_NM, branch_NM.stride(0), weight_M, eps, WIDTH=M, WIDE=wide,
            num_warps=min(16, max(1, wide // 256)), **early_launch(N),
        )  # fmt: skip
        return stream_NM
