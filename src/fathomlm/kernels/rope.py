"""Rotary position embedding at true positions.

Shapes: B batch, H heads, T tokens, D head width, R rotated width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fathomlm.depth import Rope


def frequencies(rope: Rope, rotary_dim: int, device: torch.device) -> Tensor:
    """The R/2 angular frequencies, stretched as the checkpoint asks."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim
    base = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        return base / rope.factor
    if rope.scaling == "llama3":
        return _llama3(base, rope)
    if rope.scaling == "yarn":
        return _yarn(base, rope, rotary_dim)
    if rope.scaling == "longrope":
        return base / torch.tensor(rope.factors, dtype=base.dtype, device=device)
    return base


_cached_frequencies = lru_cache(maxsize=64)(frequencies)
"""They are a pure function of their arguments. A compiler sees through a cache, and warns that it does."""


def _llama3(base: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow waves are stretched by `factor`, fast ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, base / rope.factor, base)
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * stretched / rope.factor + blend * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _yarn(base: Tensor, rope: Rope, rotary_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): frequencies with few turns over the original context are divided by `factor`, those with
    many kept, those between blended."""

    def place(turns: float) -> float:
        """Which frequency makes so many turns over the original context."""
        return rotary_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    number = torch.arange(rotary_dim // 2, dtype=torch.float32, device=base.device)
    kept = 1 - ((number - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return base / rope.factor * (1 - kept) + base * kept


def rope_table(rope: Rope, rotary_dim: int, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine at each position, shaped (B, 1, T, R) to meet the heads.

    The first half of the sines is negated: with that, turning a pair is one roll and two products (`apply_rope`).
    """
    find = frequencies if torch.compiler.is_compiling() else _cached_frequencies
    angles = (positions_BT[..., None].float() * find(rope, rotary_dim, positions_BT.device)).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R entries of each head, pairing entry i with i + R/2; the rest pass through (Pythia)."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x_BHTD.shape[-1]:
        return x_BHTD * cos + x_BHTD.roll(rotary_dim // 2, -1) * sin
    turned, rest = x_BHTD[..., :rotary_dim], x_BHTD[..., rotary_dim:]
    return torch.cat((turned * cos + turned.roll(rotary_dim // 2, -1) * sin, rest), dim=-1)
