"""LoRA initialised by truncated SVD of what tying took away (thesis 3.3.3, Eq. truncated SVD)."""

from __future__ import annotations

import torch
from torch import Tensor


def svd_factors(residual: Tensor, rank: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """A = V_r^T and B = U_r S_r with B A the best rank-r approximation of `residual`, in float32.

    Computed as the eigenvectors of the smaller Gram matrix in float64: that is as exact as a float32 SVD, since squaring
    halves the digits that float64 doubled, and about three times as fast. Where the tied weight already is the original,
    the residual is exactly zero and the thesis starts LoRA as usual: Gaussian A, zero B.
    """
    outputs, inputs = residual.shape
    rank = min(rank, outputs, inputs)
    if not residual.any():
        return _gaussian(rank, inputs, generator).to(residual.device), torch.zeros(outputs, rank, device=residual.device)
    m = residual.double()
    if outputs <= inputs:
        u = torch.linalg.eigh(m @ m.T).eigenvectors.flip(-1)[:, :rank]
        rows = u.T @ m
        lengths = torch.linalg.vector_norm(rows, dim=1)
        a, b = rows / lengths.clamp_min(torch.finfo(m.dtype).tiny)[:, None], u * lengths
        if (lost := lengths == 0).any():  # beyond the residual's own rank a direction must still be able to learn
            a[lost] = _gaussian(int(lost.sum()), inputs, generator).to(a)
    else:
        a = torch.linalg.eigh(m.T @ m).eigenvectors.flip(-1)[:, :rank].T
        b = m @ a.T
    return a.float().contiguous(), b.float().contiguous()


def _gaussian(rank: int, inputs: int, generator: torch.Generator | None) -> Tensor:
    return torch.empty(rank, inputs).normal_(std=inputs**-0.5, generator=generator)
