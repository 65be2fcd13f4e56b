"""LayerSkip (Elhoushi et al. 2024): layers are dropped in training, ever likelier with depth, and every layer learns to be
the last. What is dropped follows from the step's number and a row's own tokens, so neither how a batch is split nor where a
run was stopped changes anything.

Shapes: B rows, T tokens, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.kernels.splitmix import GOLDEN, mix


def drop_chances(layers: int, most: float) -> list[float]:
    """How likely a row skips each step: never the first, the last with `most`, doubling ones in between (section 4.1)."""
    return [most * (2 ** (step / max(layers - 1, 1)) - 1) for step in range(layers)]


def kept_steps(tokens_BT: Tensor, number: int, layers: int, most: float) -> Tensor:
    """Which rows run each step in optimizer step `number`, (S, B). Not scaled, as there: inference runs every layer."""
    device = tokens_BT.device
    places_T = mix(torch.arange(1, tokens_BT.shape[1] + 1, device=device) * GOLDEN)
    row_B = mix(((tokens_BT + 1) * places_T).sum(1) + ((number * GOLDEN + 2**63) % 2**64 - 2**63))
    steps_S = torch.arange(1, layers + 1, device=device)
    drawn_SB = mix(row_B + steps_S[:, None] * GOLDEN)
    uniform_SB = (drawn_SB & (2**53 - 1)).double() / 2**53
    return uniform_SB >= torch.tensor(drop_chances(layers, most), dtype=torch.float64, device=device)[:, None]


def summed_depth_weights(depths: Sequence[int], scale: float) -> tuple[float, ...]:
    """Section 4.2: an early output's weight is `scale` times the sum of all depths below it, from 0; the last one's is that
    and its depth more. They add up to 1."""
    *early, last = depths
    found = [scale * (depth - 1) * depth / 2 for depth in early]
    found.append(last - 1 + scale * (last - 2) * (last - 1) / 2)
    return tuple(weight / sum(found) for weight in found)
