"""Rotary position embedding at true positions.

Shapes: B batch, H heads, T tokens, D head width, R rotated width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fathomlm.depth import Rope


@lru_cache(maxsize=64)
def frequencies(rope: Rope, rotary_dim: int, device: torch.device) -> Tensor:
    """The R/2 angular frequencies, stretched as the checkpoint asks. A pure function of its arguments, hence cached."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim
    base = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        return base / rope.factor
    if rope.scaling == "llama3":
        return _llama3(base, rope)
    return base


def _llama3(base: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow waves are stretched by `factor`, fast ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, base / rope.factor, base)
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * stretched / rope.factor + blend * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def rope_table(rope: Rope, rotary_dim: int, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine at each position, shaped (B, 1, T, R) to meet the heads.

    The first half of the sines is negated: with that, turning a pair is one roll and two products (`apply_rope`).
    """
    angles = (positions_BT[..., None].float() * frequencies(rope, rotary_dim, positions_BT.device)).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R entries of each head, pairing entry i with i + R/2; the rest pass through (Pythia)."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x_BHTD.shape[-1]:
        return x_BHTD * cos + x_BHTD.roll(rotary_dim // 2, -1) * sin
    turned, rest = x_BHTD[..., :rotary_dim], x_BHTD[..., rotary_dim:]
    return torch.cat((turned * cos + turned.roll(rotary_dim // 2, -1) * sin, rest), dim=-1)
