"""LoRA: h = W x + B A x (thesis 3.3.3). The scaling is exactly 1, so that full rank can restore any weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import LinearSpec


class LoraDelta(nn.Module):
    """A low-rank delta on one linear at one step."""

    def __init__(self, spec: LinearSpec, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, spec.inputs))
        self.b = nn.Parameter(torch.empty(spec.outputs, rank))

    def reset_parameters(self) -> None:
        """The standard start: Gaussian A, zero B, so that the delta is nothing at first."""
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor, linear: nn.Linear) -> Tensor:
        out: Tensor = linear(x)
        return out + F.linear(F.linear(x, self.a), self.b)

    def merged(self, weight: Tensor) -> Tensor:
        """The plain weight that does the same, in float32."""
        return weight.float() + self.b.float() @ self.a.float()
