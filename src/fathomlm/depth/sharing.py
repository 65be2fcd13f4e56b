"""Sharing strategies: which of K unique layers runs at each of K x R steps (thesis 3.3.2; 4.3.1 and its appendix).

For L = 9 and three recursions:

    cycle      0 1 2  0 1 2  0 1 2     one block, looped
    sequence   0 0 0  1 1 1  2 2 2     each layer repeated before the next
    cycle-rev  0 1 2  0 1 2  2 1 0     cycle, with the last pass in reverse order (Takase & Kiyono 2023)

The middle-* variants keep the first and last layer apart and share what lies between.

The baseline without a loop is an ordinary model with fewer layers, of which some are dropped:

    influence  those that change the residual stream least (ShortGPT's block influence, 1 - cos(input, output), measured
               over text)
    greedy     one after another the one without which the loss over text rises least, all measured again without it
    stepwise   all but those at even intervals, the first and last among them, as stepwise initialisation picks its layers
    last       the last ones
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fathomlm.depth.architecture import Architecture
from fathomlm.errors import OptionError, choices
from fathomlm.options import option


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


def by_influence(layers: int, kept: int, influence: Sequence[float], order: Sequence[int]) -> list[int]:
    return most_influential(range(layers), kept, influence)


def greedy(layers: int, kept: int, influence: Sequence[float], order: Sequence[int]) -> list[int]:
    gone = order[: layers - kept]
    return [layer for layer in range(layers) if layer not in gone]


def stepwise(layers: int, kept: int, influence: Sequence[float], order: Sequence[int]) -> list[int]:
    return spread(0, layers - 1, kept)


def last(layers: int, kept: int, influence: Sequence[float], order: Sequence[int]) -> list[int]:
    return list(range(kept))


DROPS: dict[str, Callable[[int, int, Sequence[float], Sequence[int]], list[int]]] = {
    "influence": by_influence,
    "greedy": greedy,
    "stepwise": stepwise,
    "last": last,
}
"""Every way by its name in options and recipes: the layers that are kept, from how many there are, how many are kept, the
influence of each, and the order in which a greedy search leaves them out (both empty where they were not measured)."""
MEASURED = ("influence", "greedy")
"""Those that are measured over text."""


@dataclass(frozen=True, kw_only=True)
class DropOptions:
    """Which layers are left out."""

    drop: int | None = option(None, ge=0, help="leave out N layers; the result is an ordinary model with fewer", metavar="N")
    by: str | None = option(
        None, choices=tuple(DROPS), default_text="influence with --calibrate, otherwise stepwise", requires=("drop",),
        help="--drop: those that change the text least (influence), one at a time the one that raises the loss least "
        "(greedy, slow), all but evenly spaced ones (stepwise), or the last",
    )  # fmt: skip
    neurons: int | None = option(
        None, ge=1, metavar="N", requires=("drop",),
        help="with --calibrate: keep N feed-forward neurons of each layer that is left (--drop 0 leaves all), those that "
        "add most, and fit them to what all of them put out",
    )  # fmt: skip
    repeat: int | None = option(
        None, ge=2, metavar="R", requires=("drop",),
        help="run each layer that is left R times in place, in steps of 1/R, but for the first two and the last",
    )  # fmt: skip


def with_neurons(architecture: Architecture, neurons: int) -> Architecture:
    """The shape with so many feed-forward neurons in each layer."""
    if architecture.experts:
        raise OptionError("neurons requires layers with one feed-forward part; this model has experts")
    if architecture.cross:
        raise OptionError("neurons requires a decoder-only model: the activations of others are not measured")
    if not 1 <= neurons <= architecture.intermediate:
        raise OptionError(f"neurons must be between 1 and the model's {architecture.intermediate:,}, got {neurons:,}")
    return dataclasses.replace(architecture, intermediate=neurons)


def kept_layers(
    layers: int, drop: int, by: str | None = None, influence: Sequence[float] = (), order: Sequence[int] = ()
) -> tuple[int, ...]:
    """The layers that stay where `drop` of them go: by influence where that was measured, stepwise otherwise."""
    by = by or ("influence" if influence else "stepwise")
    if by not in DROPS:
        raise OptionError(choices("by", by, DROPS))
    if not 0 <= drop < layers:
        raise OptionError(f"drop must be between 0 and {layers - 1}, one less than the model's {layers} layers; got {drop}")
    if by in MEASURED and not influence:
        raise OptionError(f"by {by} requires calibration text, over which layers are measured (--calibrate FILE)")
    if by == "greedy" and len(order) < drop:
        raise OptionError(f"by greedy requires an order of {drop} layers: measure the activations with greedy={drop}")
    return tuple(DROPS[by](layers, layers - drop, influence, order))


def most_influential(layers: Sequence[int], count: int, influence: Sequence[float]) -> list[int]:
    """So many of some layers, in order; of two with the same influence the earlier one."""
    return sorted(sorted(layers, key=lambda layer: (-influence[layer], layer))[:count])
