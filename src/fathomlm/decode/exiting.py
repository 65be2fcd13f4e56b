"""How tokens may leave early: what a user may ask for, and what is checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from fathomlm.decode.confidence import MEASURES
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices, require

Mode = Literal["full", "static", "state-copy", "parallel", "speculative", "oracle"]
MODES: tuple[str, ...] = get_args(Mode)
USED: dict[str, tuple[str, ...]] = {
    "full": (),
    "static": ("exit_layers",),
    "state-copy": ("exit_layers", "min_exit_layer", "confidence", "threshold"),
    "parallel": ("exit_layers", "confidence", "threshold", "refine", "max_stack"),
    "speculative": ("exit_layers", "confidence", "threshold", "max_stack"),
    "oracle": ("exit_layers", "min_exit_layer", "confidence", "threshold"),
}
"""The options that each mode has."""
MULTIPLE = ("state-copy", "oracle")
"""The modes with any number of exits; the others have one."""
DEFAULT_THRESHOLD = 0.9
DEFAULT_STACK = 16


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold that learns while texts are made, such as `ThresholdEstimator` (thesis 2.5.3)."""

    @property
    def threshold(self) -> float:
        """The one in force."""
        ...

    def observe(self, confidences: Sequence[float], agreements: Sequence[bool]) -> None:
        """Confidences at an exit, and whether the likeliest token there was the whole model's too."""
        ...

    def end_sequence(self) -> None:
        """A text is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exiting:
    """Leaving early: how, where and when. Fields that are None get their mode's default, where it has one."""

    mode: Mode
    """full: every token runs every layer. static: every token leaves at the exit, a shallow model. state-copy: deeper
    layers get their keys and values from the state that left (CALM). parallel: they run later, over several tokens at once
    (FREE). speculative: what was chosen at the exit is a draft that the whole model accepts or replaces. oracle: the
    earliest exit that chooses what the last layer chooses."""
    exit_layers: tuple[int, ...] | None = None
    """The layers after which a token may leave, from 1 and in unrolled depth. None: the exits that the model was trained
    with, or all from `min_exit_layer` on."""
    confidence: str | None = None
    """What is compared with the threshold: gap (default), max, state or classifier."""
    threshold: float | AdaptiveThreshold | None = None
    """A token leaves where its confidence is above this (default: 0.9). 1 never leaves, and 0 always does. An estimator's
    threshold is read once a batch; what it learns from the batch holds for the next."""
    min_exit_layer: int | None = None
    """state-copy, oracle: every layer from this one on is an exit."""
    refine: float | None = None
    """parallel: how surprised the whole model may be at a token that left early, -log p, before the text goes back to
    there. 0 allows no other token than its likeliest; infinity is never surprised."""
    max_stack: int | None = None
    """parallel, speculative: how many tokens may wait for the deeper layers (default: 16)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(choices("decoding mode", str(self.mode), MODES))
        for name in ("exit_layers", "confidence", "threshold", "min_exit_layer", "refine", "max_stack"):
            if getattr(self, name) is not None and name not in USED[self.mode]:
                users = _listed([mode for mode in MODES if name in USED[mode]])
                raise OptionError(f"{name} is not for {self.mode} decoding, only for {users}")
        for name, value in (("confidence", "gap"), ("threshold", DEFAULT_THRESHOLD), ("max_stack", DEFAULT_STACK)):
            unset = name in USED[self.mode] and getattr(self, name) is None
            if unset and not (name == "threshold" and self.mode == "oracle"):
                object.__setattr__(self, name, value)
        self._check_layers()
        if self.confidence is not None and self.confidence not in MEASURES:
            raise OptionError(choices("confidence", str(self.confidence), MEASURES))
        self._check_threshold()
        refine = self.refine
        surprised = refine is None or (_is_number(refine) and refine >= 0)
        require(surprised, "refine", "a number from 0 on, or infinity", refine)
        stack = self.max_stack
        require(stack is None or _is_count(stack), "max_stack", "an integer from 1 on", stack)

    def _check_layers(self) -> None:
        layers = self.exit_layers
        if layers is not None:
            layers = tuple(layers) if isinstance(layers, list | tuple) else (layers,)
            counts = bool(layers) and all(_is_count(layer) for layer in layers)
            require(counts, "exit_layers", "one or more layers, counted from 1", self.exit_layers)
            object.__setattr__(self, "exit_layers", tuple(sorted(set(layers))))
        least = self.min_exit_layer
        require(least is None or _is_count(least), "min_exit_layer", "a layer, counted from 1", least)
        if least is not None and layers is not None:
            raise OptionError("exit_layers names every exit and min_exit_layer all from one on; give one of them")

    def _check_threshold(self) -> None:
        threshold = self.threshold
        if threshold is None or isinstance(threshold, AdaptiveThreshold):
            return
        if self.mode == "oracle":
            raise OptionError("an oracle compares choices and takes no threshold; an estimator may watch it and learn")
        inside = _is_number(threshold) and 0 <= threshold <= 1
        require(inside, "threshold", "from 0 (always leave) to 1 (never), or an estimator", threshold)

    @property
    def estimator(self) -> AdaptiveThreshold | None:
        """What learns the threshold, where something does."""
        return self.threshold if isinstance(self.threshold, AdaptiveThreshold) else None

    def threshold_now(self) -> float | None:
        """The number in force; None where the mode compares none."""
        threshold = self.threshold
        if self.mode == "oracle" or threshold is None:
            return None
        return float(threshold.threshold if isinstance(threshold, AdaptiveThreshold) else threshold)

    def exits(self, plan: DepthPlan) -> tuple[int, ...]:
        """The indices of the steps after which a token of this model may leave, the last step left out."""
        if plan.routing is not None:
            raise OptionError(
                f"{self.mode} decoding is for models without a router: this one's router already chooses each token's depth"
            )
        if self.mode == "full":
            return ()
        layers = self._layers(plan)
        last = plan.unrolled_layers
        for layer in layers:
            if layer >= last:
                raise OptionError(f"a token may leave after layers 1 to {last - 1} of this model's {last}, got {layer}")
        if len(layers) > 1 and self.mode not in MULTIPLE:
            raise OptionError(
                f"{self.mode} decoding has one exit, and here are {len(layers)}, after layers {_listed(layers)}; "
                f"name one of them as the exit layer, such as {layers[0]}"
            )
        return tuple(layer - 1 for layer in layers)

    def _layers(self, plan: DepthPlan) -> Sequence[int]:
        if self.exit_layers is not None:
            return self.exit_layers
        if self.min_exit_layer is not None:
            # The last layer itself when it is too high, so that the caller refuses it by its number.
            return range(self.min_exit_layer, max(plan.unrolled_layers, self.min_exit_layer + 1))
        if plan.exits:
            return tuple(index + 1 for index in plan.exits)
        raise OptionError(f"this model names no exits of its own, so name an exit layer: {_suggestion(plan)}")


def _suggestion(plan: DepthPlan) -> str:
    """What would be right for a model that names no exits."""
    layers = plan.unrolled_layers
    if layers < 2:
        return "but with one layer it has no place for one"
    if plan.recursions > 1 and plan.whole_passes:
        ends = [index + 1 for index in plan.recursion_ends()]
        return f"{_listed(ends, 'or')}, where its recursions end, or any other from 1 to {layers - 1}"
    return f"one from 1 to {layers - 1}, such as {max(1, layers // 3)}"


def _listed(items: Sequence[object], last: str = "and") -> str:
    """a, b and c."""
    words = [str(item) for item in items]
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
