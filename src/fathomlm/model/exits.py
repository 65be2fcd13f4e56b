"""What an early exit has of its own, trained over a model that stays as it is: an adapter and a classifier.

Shapes: M hidden width, r rank; `...` are batch and tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture
from fathomlm.kernels.norm import RMSNorm


class ExitAdapter(nn.Module):
    """x + B silu(A norm(x)) on the residual stream at an exit, in front of the final norm and the head.

    A token that does not leave goes on from x itself, so the last output is what it was, bit for bit.
    """

    def __init__(self, architecture: Architecture, rank: int) -> None:
        super().__init__()
        self.norm = RMSNorm(architecture.hidden, architecture.norm_eps, plus_one=False)
        self.a = nn.Parameter(torch.empty(rank, architecture.hidden))
        self.b = nn.Parameter(torch.empty(architecture.hidden, rank))

    def reset_parameters(self) -> None:
        """Gaussian A, zero B: it starts as the plain exit. The norm is a module of its own and resets itself."""
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(self.norm(x), self.a))
        return x + F.linear(inner, self.b)


class ExitClassifier(nn.Module):
    """From what the head reads at an exit to one logit: that the likeliest word here is the last output's too (CALM,
    Schuster et al. 2022, section 3.3)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, architecture.hidden))
        self.bias = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """It starts undecided."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)[..., 0]
