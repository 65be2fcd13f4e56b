"""Sharing strategies: which of K unique layers runs at each of K x R steps (thesis 3.3.2; 4.3.1 and its appendix).

Each strategy is a pure function of (unique layers, recursions). For L = 9 and three recursions:

    cycle      0 1 2  0 1 2  0 1 2     one block, looped
    sequence   0 0 0  1 1 1  2 2 2     each layer repeated before the next
    cycle-rev  0 1 2  0 1 2  2 1 0     cycle, with the last pass in reverse order (Takase & Kiyono 2023)

The middle-* variants keep the first and last layer apart and share what lies between (`DepthPlan` adds those two).
"""

from __future__ import annotations

from collections.abc import Callable


def cycle(unique: int, recursions: int) -> list[int]:
    return list(range(unique)) * recursions


def sequence(unique: int, recursions: int) -> list[int]:
    return [layer for layer in range(unique) for _ in range(recursions)]


def cycle_rev(unique: int, recursions: int) -> list[int]:
    last = list(range(unique)) if recursions == 1 else list(reversed(range(unique)))
    return list(range(unique)) * (recursions - 1) + last


STRATEGIES: dict[str, Callable[[int, int], list[int]]] = {
    "cycle": cycle,
    "sequence": sequence,
    "cycle-rev": cycle_rev,
    "middle-cycle": cycle,
    "middle-sequence": sequence,
}


def kept_apart(sharing: str) -> int:
    """How many layers stay unshared at each end: one for the middle-* strategies, none otherwise."""
    return 1 if sharing.startswith("middle-") else 0


def spread(first: int, last: int, count: int) -> list[int]:
    """`count` integers evenly from `first` to `last`, both included: round(linspace(first, last, count)).

    Stepwise initialisation picks its layers so (thesis 3.3.2, "fixed-ends"). The arithmetic is numpy's, in numpy's
    order, so that a place half-way between two layers falls where `np.linspace(...).round()` puts it: the middle one of
    15 from 30 is layer 15.
    """
    if count == 1:
        return [first]
    gap = (last - first) / (count - 1)
    return [*(round(i * gap + first) for i in range(count - 1)), last]
