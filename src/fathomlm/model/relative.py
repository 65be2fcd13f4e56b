"""T5's position bias: a learned number for each head and distance, added to the scores of self-attention.

A decoder has one table for all of its steps (Hugging Face keeps it in the first layer). Only distances count, so a token
may be gathered, continue a cache or stand behind padding: what matters are the true positions of query and key.

Shapes: B rows, T queries, S keys, H heads, D distances from 0 to the farthest that is told apart.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture


@lru_cache(maxsize=64)
def buckets_of(buckets: int, farthest: int, device: torch.device) -> Tensor:
    """The bucket of each distance. Half of the buckets hold one distance each, the rest ranges that grow as its logarithm.

    A pure function of its arguments, hence cached; in float32 on the CPU, so that every device agrees at the borders.
    """
    exact = buckets // 2
    with torch.inference_mode(False):  # or a table first made by a decoder could not serve training
        distance = torch.arange(farthest + 1, device="cpu")
        grown = torch.log(distance.clamp_min(1).float() / exact) / math.log(farthest / exact) * (buckets - exact)
        far = (exact + grown.long()).clamp_max(buckets - 1)
        return torch.where(distance < exact, distance, far).to(device)


class RelativeBias(nn.Module):
    """The table, (buckets, heads)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.relative_buckets, architecture.heads))
        self.farthest = architecture.relative_distance

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
        """What the score of each query and key gains, (B, H, T, S), from their positions. Keys ahead of a query count as
        its own place; a mask hides them."""
        distance_BTS = (queries_BT[:, :, None] - keys_BS[:, None, :]).clamp(0, self.farthest)
        table_DH = self.weight[buckets_of(self.weight.shape[0], self.farthest, self.weight.device)]
        return F.embedding(distance_BTS, table_DH).permute(0, 3, 1, 2).contiguous()
