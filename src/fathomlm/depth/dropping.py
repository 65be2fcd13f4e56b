"""Layer dropping: which of L layers a smaller model keeps. The baseline without a loop: an ordinary model with fewer layers.

influence  those that change the residual stream least are dropped (ShortGPT's block influence, 1 - cos(input, output),
           measured over text)
stepwise   kept at even intervals, the first and last always among them, as stepwise initialisation picks its layers
last       the last ones are dropped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fathomlm.depth.sharing import spread
from fathomlm.errors import OptionError, choices
from fathomlm.options import option


def by_influence(layers: int, kept: int, influence: Sequence[float]) -> list[int]:
    return most_influential(range(layers), kept, influence)


def stepwise(layers: int, kept: int, influence: Sequence[float]) -> list[int]:
    return spread(0, layers - 1, kept)


def last(layers: int, kept: int, influence: Sequence[float]) -> list[int]:
    return list(range(kept))


DROPS: dict[str, Callable[[int, int, Sequence[float]], list[int]]] = {
    "influence": by_influence,
    "stepwise": stepwise,
    "last": last,
}
"""Every way by its name in options and recipes: the layers that are kept, from how many there are, how many are kept, and
the influence of each (empty where none was measured)."""
MEASURED = ("influence",)
"""Those that ask for the layers' influence."""


@dataclass(frozen=True, kw_only=True)
class DropOptions:
    """Which layers are left out."""

    drop: int | None = option(None, ge=0, help="leave out N layers; the result is an ordinary model with fewer", metavar="N")
    by: str | None = option(
        None, choices=tuple(DROPS), default_text="influence with --calibrate, otherwise stepwise", requires=("drop",),
        help="--drop: those that change the text least (influence), all but evenly spaced ones (stepwise), or the last",
    )  # fmt: skip


def kept_layers(layers: int, drop: int, by: str | None = None, influence: Sequence[float] = ()) -> tuple[int, ...]:
    """The layers that stay where `drop` of them go: by influence where that was measured, stepwise otherwise."""
    by = by or ("influence" if influence else "stepwise")
    if by not in DROPS:
        raise OptionError(choices("by", by, DROPS))
    if not 0 <= drop < layers:
        raise OptionError(f"drop must be between 0 and {layers - 1}, one less than the model's {layers} layers; got {drop}")
    if by in MEASURED and not influence:
        raise OptionError(f"by {by} requires calibration text, over which layers' influence is measured (--calibrate FILE)")
    return tuple(DROPS[by](layers, layers - drop, influence))


def most_influential(layers: Sequence[int], count: int, influence: Sequence[float]) -> list[int]:
    """So many of some layers, in order; of two with the same influence the earlier one."""
    return sorted(sorted(layers, key=lambda layer: (-influence[layer], layer))[:count])
