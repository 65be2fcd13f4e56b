"""splitmix64 (Steele, Lea and Flood 2014) over tensors: random bits that follow from numbers alone, the same on every device
and in any batch."""

from __future__ import annotations

from torch import Tensor

GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Its constants, as signed numbers: torch has no unsigned arithmetic of 64 bits. It counts by the first."""


def mix(z: Tensor) -> Tensor:
    """Its finaliser; products wrap around."""
    z = (z ^ shift(z, 30)) * FIRST
    z = (z ^ shift(z, 27)) * SECOND
    return z ^ shift(z, 31)


def shift(z: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in; torch's own shift brings in the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
