"""Where a model's predictions are read: at its end, after a layer or a recursion, or with fewer recursions.

Exiting every token at one exit is the thesis' static exiting (3, early-exit tables), fewer recursions its test-time scaling
(4.6.3). One pass over the tokens serves all exits at once; every maximum depth is a pass of its own.

Shapes: B rows, T tokens, N positions that are asked, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fathomlm.decode.exiting import Exiting, check_exit_layers
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import DepthControl

EXITS = ("recursion", "layer", "all")
"""Sets of exits that have a name; single layers are given by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One place; without fields, the model's end."""

    layer: int | None = None
    """Exit after this layer, from 1, in unrolled depth."""
    recursion: int | None = None
    """Which recursion ends there, from 1: a name, it changes nothing."""
    max_depth: int | None = None
    """Run at most this many recursions, and what follows them."""

    @property
    def name(self) -> str:
        if self.max_depth is not None:
            return f"max. depth {self.max_depth}"
        if self.layer is None:
            return "full"
        return f"layer {self.layer}" + ("" if self.recursion is None else f" (recursion {self.recursion})")

    @property
    def control(self) -> DepthControl | None:
        """The depth control for fewer recursions."""
        return None if self.max_depth is None else DepthControl(max_depth=self.max_depth)

    @property
    def exiting(self) -> Exiting | None:
        """The early-exit settings for this layer."""
        return None if self.layer is None else Exiting(mode="static", exit_layers=(self.layer,))

    def record(self) -> dict[str, Any]:
        return {"output": self.name, "layer": self.layer, "recursion": self.recursion, "max_depth": self.max_depth}


FULL = Output()


def choose_outputs(plan: DepthPlan, exits: str | None, max_depth: str | int | None) -> tuple[Output, ...]:
    """What `--exit` and `--max-depth` ask of a model; neither asks for its end."""
    if exits is not None and max_depth is not None:
        raise OptionError("--exit and --max-depth cannot be combined")
    if exits is not None:
        return exit_outputs(plan, exits)
    return (FULL,) if max_depth is None else depth_outputs(plan, max_depth)


def exit_outputs(plan: DepthPlan, where: str) -> tuple[Output, ...]:
    """The ends of recursions, all layers, or layers by number such as 4,8; and the model's end, to compare with."""
    if plan.routing is not None:
        raise OptionError(
            "a routed model has no exits: its router already chooses each token's depth; --max-depth limits it"
        )
    last = plan.unrolled_layers
    ends = {index + 1: number for number, index in enumerate(plan.recursion_ends(), start=1)} if plan.whole_passes else {}
    if where == "recursion":
        if plan.recursions < 2:
            raise OptionError("--exit recursion requires a looped model; did you mean --exit layer?")
        plan.recursion_ends()  # refuses plans whose recursions have no output
        layers: Sequence[int] = tuple(ends)
    elif where in EXITS:
        layers = range(1, last)
    else:
        layers = _layers(where, plan)
    named = where != "layer" and plan.recursions > 1
    return (*(Output(layer=layer, recursion=ends.get(layer) if named else None) for layer in layers), FULL)


def _layers(where: str, plan: DepthPlan) -> tuple[int, ...]:
    words = [word.strip() for word in where.split(",")]
    for word in (word for word in words if not word.isdecimal()):
        raise OptionError(f"{choices('exit', word, EXITS)}, or layers such as 4,8")
    layers = sorted({int(word) for word in words})
    check_exit_layers(plan, layers)
    return tuple(layers)


def depth_outputs(plan: DepthPlan, which: str | int) -> tuple[Output, ...]:
    """Every number of recursions, or one."""
    if plan.recursions < 2:
        raise OptionError("--max-depth requires a looped model")
    if which == "all":
        return tuple(Output(max_depth=depth) for depth in range(1, plan.recursions + 1))
    if not str(which).isdecimal():
        raise OptionError(f"--max-depth takes a number of recursions, or all; got '{which}'")
    DepthControl(max_depth=int(which)).check(plan.recursions)
    return (Output(max_depth=int(which)),)


@dataclass(frozen=True, slots=True)
class OutputStates:
    """What one output says at some positions, before the head."""

    number: int
    """Which of the outputs that were asked for."""
    state_NM: Tensor
    index: int | None
    """The step behind which the state was taken; None where it went through the final norm already."""

    def logits(self, decoder: Decoder, part: slice) -> Tensor:
        """(n, V), for some of the positions: the vocabulary is wide, so nobody asks for all at once."""
        state_NM = self.state_NM[part]
        return decoder.logits(state_NM) if self.index is None else decoder.exit_logits(state_NM, self.index)


def read_documents(
    decoder: Decoder, outputs: Sequence[Output], tokens_BT: Tensor, rows_N: Tensor, slots_N: Tensor
) -> Iterator[OutputStates]:
    """Each output's states at positions given by row and slot.

    Rows end with padding of any kind: no token sees what comes behind it, and a router decides on each token by itself, so
    padding needs no mask. Routed models decide causally, as in use.
    """
    last = decoder.plan.unrolled_layers - 1
    plain = [number for number, output in enumerate(outputs) if output.max_depth is None]
    if plain and decoder.plan.routing is None:
        at = {number: last if (layer := outputs[number].layer) is None else layer - 1 for number in plain}
        found = decoder.states(tokens_BT, at=set(at.values()))
        for number, index in at.items():
            yield OutputStates(number, found[index][rows_N, slots_N], index)
        del found
    for number, output in enumerate(outputs):
        if output.max_depth is not None or decoder.plan.routing is not None:
            hidden_BTM = decoder(tokens_BT, control=output.control)
            yield OutputStates(number, hidden_BTM[rows_N, slots_N], None)
