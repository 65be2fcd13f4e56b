"""LoRA initialised by truncated SVD of what tying took away (thesis 3.3.3, Eq. truncated SVD)."""

from __future__ import annotations

import torch
from torch import Tensor


def svd_factors(residual: Tensor, rank: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """A = V_r^T and B = U_r S_r with B A the best rank-r approximation of `residual`, in float32.

    Where the tied weight already is the original, the residual is exactly zero and the thesis starts LoRA as usual:
    Gaussian A, zero B.
    """
    residual = residual.float()
    outputs, inputs = residual.shape
    rank = min(rank, outputs, inputs)
    if not residual.any():
        a = torch.empty(rank, inputs).normal_(std=inputs**-0.5, generator=generator).to(residual.device)
        return a, residual.new_zeros(outputs, rank)
    u, s, vh = torch.linalg.svd(residual, full_matrices=False)
    return vh[:rank].contiguous(), (u[:, :rank] * s[:rank]).contiguous()
