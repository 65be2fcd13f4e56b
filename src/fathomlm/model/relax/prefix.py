"""Prefix: P vectors of the hidden width that go straight through a step's k and v projections, without a position, and stand
in front of every token's keys (thesis appendix on alternative relaxations)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fathomlm.depth import Architecture, Relaxation
from fathomlm.model.relax import StepDelta

STD = 0.02


class PrefixStep(StepDelta):
    def __init__(self, architecture: Architecture, relaxation: Relaxation) -> None:
        super().__init__(architecture, relaxation)
        self.prefix = nn.Parameter(torch.empty(relaxation.prefix_length, architecture.hidden))

    def reset_parameters(self) -> None:
        assert self.prefix is not None
        nn.init.normal_(self.prefix, std=STD)

    def own_starts(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        assert self.prefix is not None
        yield "prefix", torch.empty(self.prefix.shape).normal_(std=STD, generator=generator)
