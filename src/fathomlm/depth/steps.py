"""The steps of a plan: a sharing strategy laid over the layers of a base, whose depth its recursions must divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fathomlm.depth.bounds import check_size
from fathomlm.depth.sharing import STRATEGIES, spread
from fathomlm.errors import OptionError, PlanError, choices

Resize = Literal["add", "drop"]
Part = Literal["prelude", "core", "coda", "exit"]
"""An exit's own step stands beside the plan's: see `DepthPlan.exit_steps`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One application of a layer."""

    index: int
    """Its place in the unrolled depth, from 0."""
    layer: int
    """The unique layer that runs."""
    recursion: int
    """Which use of that layer this is, from 0; always 0 in prelude and coda."""
    part: Part
    origin: int
    """The base layer whose place this step takes: its window, and what its relaxation is initialised towards."""


def checked(name: str, value: object, *, called: str | None = None) -> int:
    """A size within its bounds, or an error of the plan that says them."""
    try:
        return check_size(name, value, called=called)
    except OptionError as error:
        raise PlanError(str(error)) from None


def core_and_ends(
    sharing: str, recursions: int, base_layers: int, resize: Resize | None, ends: tuple[int, int] | None
) -> tuple[int, tuple[int, int]]:
    """How many layers of the core are unique, and how many there are in front of it and behind it."""
    if sharing not in STRATEGIES:
        raise PlanError(choices("sharing strategy", sharing, STRATEGIES))
    checked("recursions", recursions)
    checked("base_layers", base_layers, called="layers")
    if resize not in (None, "add", "drop"):
        raise PlanError(f"resize must be 'add' or 'drop', got {resize!r}")
    apart = STRATEGIES[sharing].kept_apart
    prelude, coda = ends = (apart, apart) if ends is None else ends
    if min(ends) < min(apart, 1) or (max(ends) and not apart):
        raise PlanError(f"ends must be >= 1 and require a middle-* strategy, got {prelude} and {coda} for {sharing}")
    core = base_layers - prelude - coda
    if core < 1:
        kept = "the first and last layer" if ends == (1, 1) else f"{prelude} + {coda} layers"
        raise PlanError(
            f"{sharing} keeps {kept} apart, so it requires at least {prelude + coda + 1} layers; got {base_layers}"
        )
    if core % recursions:
        if resize is None:
            raise PlanError(_does_not_divide(recursions, base_layers, core, ends))
        core += -core % recursions if resize == "add" else -(core % recursions)
    unique = core // recursions
    if unique < 1:
        most = base_layers - prelude - coda
        raise PlanError(f"{recursions} recursions leave no layer of {base_layers}; at most {most} fit")
    return unique, ends


def lay(sharing: str, recursions: int, base_layers: int, unique: int, ends: tuple[int, int]) -> Iterator[Step]:
    """The steps in order: prelude, core and coda, each with the base layer whose place it takes."""
    order = STRATEGIES[sharing].order(unique, recursions)
    prelude, coda = ends
    origins = spread(prelude, base_layers - 1 - coda, len(order))
    yield from (Step(i, i, 0, "prelude", i) for i in range(prelude))
    seen: dict[int, int] = {}
    for i, (layer, origin) in enumerate(zip(order, origins, strict=True)):
        recursion = seen.get(layer, 0)
        seen[layer] = recursion + 1
        yield Step(prelude + i, prelude + layer, recursion, "core", origin)
    behind = prelude + len(order)
    yield from (Step(behind + i, prelude + unique + i, 0, "coda", base_layers - coda + i) for i in range(coda))


def _does_not_divide(recursions: int, base_layers: int, core: int, ends: tuple[int, int]) -> str:
    kept = "first and last" if ends == (1, 1) else f"first {ends[0]} and last {ends[1]}"
    apart = f" ({base_layers} less the {kept})" if core != base_layers else ""
    fits = ", ".join(str(n) for n in range(1, core + 1) if core % n == 0)
    more = core + -core % recursions
    total = more + base_layers - core
    shape = f"{ends[0]}+{more // recursions}+{ends[1]}" if core != base_layers else str(more // recursions)
    return (
        f"{recursions} recursions do not divide {core} layers{apart}; these do: {fits}. "
        f"--resize (model.resize in a recipe) adds {total - base_layers} ({shape} looped {recursions} times, "
        f"{total} layers in all)"
    )
