"""DoRA: the LoRA weight's direction, with a learned length for each output row (thesis appendix, Table of KV relaxations).

h = m * (W + B A) x / |W + B A|, the norm taken over each row and, as its authors do, kept out of the gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import LinearSpec
from fathomlm.model.relax.lora import LoraDelta


class DoraDelta(LoraDelta):
    """A low-rank delta with row lengths of its own."""

    def __init__(self, spec: LinearSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self.magnitude = nn.Parameter(torch.empty(spec.outputs))

    def reset_parameters(self) -> None:
        """Lengths of 1 until `set_magnitude` has seen the shared weight."""
        super().reset_parameters()
        nn.init.ones_(self.magnitude)

    @torch.no_grad()
    def set_magnitude(self, weight: Tensor) -> None:
        """Start from the rows' own lengths, so that the module begins as the plain LoRA delta."""
        self.magnitude.copy_(self._lengths(weight))

    def forward(self, x: Tensor, linear: nn.Linear) -> Tensor:
        direction = F.linear(x, linear.weight) + F.linear(F.linear(x, self.a), self.b)
        scale = (self.magnitude.float() / self._lengths(linear.weight)).to(direction.dtype)
        out = scale * direction
        return out if linear.bias is None else (out + linear.bias).to(out.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        rows: Tensor = (self.magnitude.float() / self._lengths(weight))[:, None] * super().merged(weight)
        return rows

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(super().merged(weight), dim=1)
        return lengths.clamp_min(1e-12)
