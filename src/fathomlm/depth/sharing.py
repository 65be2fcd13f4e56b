"""Sharing strategies: which of K unique layers runs at each of K x R steps (thesis 3.3.2; 4.3.1 and its appendix).

For L = 9 and three recursions:

    cycle      0 1 2  0 1 2  0 1 2     one block, looped
    sequence   0 0 0  1 1 1  2 2 2     each layer repeated before the next
    cycle-rev  0 1 2  0 1 2  2 1 0     cycle, with the last pass in reverse order (Takase & Kiyono 2023)

The middle-* variants keep the first and last layer apart and share what lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """One strategy."""

    order: Callable[[int, int], list[int]]
    """The layer of each step, from how many layers are unique and how often each runs."""
    kept_apart: int = 0
    """How many layers stay unshared at each end."""
    loops: bool = False
    """Whether the core is one block run again and again in one order, so that routers fit between its passes."""
    whole_passes: bool = False
    """Whether a recursion runs the whole core before the next begins, so that a recursion has an output."""


def cycle(unique: int, recursions: int) -> list[int]:
    return list(range(unique)) * recursions


def sequence(unique: int, recursions: int) -> list[int]:
    return [layer for layer in range(unique) for _ in range(recursions)]


def cycle_rev(unique: int, recursions: int) -> list[int]:
    last = list(range(unique)) if recursions == 1 else list(reversed(range(unique)))
    return list(range(unique)) * (recursions - 1) + last


STRATEGIES: dict[str, Sharing] = {
    "cycle": Sharing(order=cycle, loops=True, whole_passes=True),
    "sequence": Sharing(order=sequence),
    "cycle-rev": Sharing(order=cycle_rev, whole_passes=True),
    "middle-cycle": Sharing(order=cycle, kept_apart=1, loops=True, whole_passes=True),
    "middle-sequence": Sharing(order=sequence, kept_apart=1),
}
"""Every strategy by its name in options, recipes and files."""


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
