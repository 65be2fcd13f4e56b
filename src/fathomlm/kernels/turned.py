"""Weights side by side, turned: what a backward product multiplies with."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fathomlm::turned", mutates_args=())
def turned(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """cat(weights) transposed, laid out anew (M, W). `x @ turned(...).T` then reads both its factors along the summed
    width, the layout in which Hopper's products are fastest. An operation of its own, because a compiler takes the copy
    for a matter of strides and leaves it out."""
    return torch.cat([weight.to(dtype) for weight in weights]).T.contiguous()


@turned.register_fake
def _(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    return weights[0].new_empty(weights[0].shape[1], sum(weight.shape[0] for weight in weights), dtype=dtype)
