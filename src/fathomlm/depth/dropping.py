"""The baseline without a loop is an ordinary model with fewer layers, of which some are dropped:

    influence  those that change the residual stream least (ShortGPT's block influence, 1 - cos(input, output), measured
               over text)
    greedy     one after another the one without which the loss over text rises least, all measured again without it
    stepwise   all but those at even intervals, the first and last among them, as stepwise initialisation picks its layers
    last       the last ones
    3,4,5,14   just these, counted from 0

What is left may then run several times in place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fathomlm.depth.architecture import Architecture
from fathomlm.depth.bounds import check_size
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.sharing import spread
from fathomlm.errors import OptionError, nearest, require
from fathomlm.options import option


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


_NUMBER = re.compile("[0-9]{1,6}")


def named_layers(by: str) -> tuple[int, ...] | None:
    """The layers that `by` names one by one; None where it names a way."""
    numbers = [word.strip() for word in by.split(",")]
    return tuple(map(int, numbers)) if all(_NUMBER.fullmatch(word) for word in numbers) else None


def check_by(name: str, by: object) -> None:
    """Refuse what is neither a way nor layers."""
    if isinstance(by, str) and by not in DROPS and named_layers(by) is None:
        shown = by[:60]
        known = ", ".join(DROPS)
        raise OptionError(f"invalid {name} '{shown}'{nearest(shown, DROPS)}; choose from {known}, or name layers: 3,4,5,14")


def _read_by(text: str, flag: str) -> str:
    check_by(flag, text)
    return text


@dataclass(frozen=True, kw_only=True)
class DropOptions:
    """Which layers are left out."""

    drop: int | None = option(None, ge=0, help="leave out N layers; the result is an ordinary model with fewer", metavar="N")
    by: str | None = option(
        None, also=check_by, parse=_read_by, metavar="WAY", requires=("drop",),
        default_text="influence with --calibrate, otherwise stepwise",
        help="--drop: those that change the text least (influence), one at a time the one that raises the loss least "
        "(greedy, slow), all but evenly spaced ones (stepwise), the last (last), or the layers themselves, counted from 0 "
        "(3,4,5,14)",
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


def with_vocab(architecture: Architecture, vocab: int, name: str = "vocab") -> Architecture:
    """The shape with so many of its tokens; `name` is what users call the number."""
    if not 1 <= vocab <= architecture.vocab:
        raise OptionError(f"{name} must be <= the model's vocabulary of {architecture.vocab:,}, got {vocab}")
    return dataclasses.replace(architecture, vocab=vocab)


def kept_layers(
    layers: int, drop: int, by: str | None = None, influence: Sequence[float] = (), order: Sequence[int] = ()
) -> tuple[int, ...]:
    """The layers that stay where `drop` of them go: by influence where that was measured, stepwise otherwise."""
    if by is None:
        by = "influence" if influence else "stepwise"
    require(isinstance(by, str), "by", "a way such as 'influence', or layers such as '3,4,5'", by)
    check_by("by", by)
    if not 0 <= drop < layers:
        raise OptionError(f"drop must be between 0 and {layers - 1}, one less than the model's {layers} layers; got {drop}")
    if (named := named_layers(by)) is not None:
        return _all_but(named, layers, drop, by)
    if by in MEASURED and not influence:
        raise OptionError(f"by {by} requires calibration text, over which layers are measured (--calibrate FILE)")
    if by == "greedy" and len(order) < drop:
        raise OptionError(f"by greedy requires an order of {drop} layers: measure the activations with greedy={drop}")
    return tuple(DROPS[by](layers, layers - drop, influence, order))


def _all_but(named: Sequence[int], layers: int, drop: int, by: str) -> tuple[int, ...]:
    if len(set(named)) < len(named) or max(named) >= layers:
        raise OptionError(f"by must name different layers between 0 and {layers - 1}, got {by:.60}")
    if len(named) != drop:
        raise OptionError(f"by names {len(named)} layers, but drop is {drop}")
    return tuple(layer for layer in range(layers) if layer not in named)


def most_influential(layers: Sequence[int], count: int, influence: Sequence[float]) -> list[int]:
    """So many of some layers, in order; of two with the same influence the earlier one."""
    return sorted(sorted(layers, key=lambda layer: (-influence[layer], layer))[:count])


REPEATED_ENDS = (2, 1)
"""Layers at the beginning and the end that are not repeated in place: those that write most to the residual stream."""


def repeated_plan(layers: int, times: int) -> DepthPlan:
    """Each of so many layers `times` times in a row, but for those at the ends."""
    if layers <= sum(REPEATED_ENDS):
        raise OptionError(f"repeat leaves the first two layers and the last alone; it requires more than 3, got {layers}")
    check_size("layers", layers + (layers - sum(REPEATED_ENDS)) * (times - 1), called="the layers that run with repeat")
    return DepthPlan.build("middle-sequence", times, len(repeated_layers(layers, times)), ends=REPEATED_ENDS)


def check_repeat(architecture: Architecture, times: int) -> None:
    """Refuse layers that cannot be repeated in smaller steps, or not so often."""
    if architecture.residual not in ("pre", "parallel") or architecture.cross:
        raise OptionError("repeat requires output projections that write to the residual stream, without norms behind them")
    repeated_plan(architecture.layers, times)


def repeated_layers(layers: int, times: int) -> tuple[int, ...]:
    """The layer at each step of that plan."""
    first, last = REPEATED_ENDS
    inner = range(first, layers - last)
    return (*range(first), *(layer for layer in inner for _ in range(times)), *range(layers - last, layers))
