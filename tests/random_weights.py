"""Random weights for small models: nothing in them is what a fresh model would have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, std: float | Callable[[str], float] = 0.3) -> None:
    """Draw every parameter, those of norms around 1. `std` may depend on a parameter's name."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        spread = std if isinstance(std, float) else std(name)
        parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=spread, generator=generator)
