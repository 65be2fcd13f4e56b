"""Root-mean-square norm, in float32 whatever the input's dtype, as every family here does it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
