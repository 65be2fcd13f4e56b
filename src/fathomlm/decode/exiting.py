"""How tokens may exit early: what a user may ask for, and what is checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from fathomlm.depth import DepthPlan, Step
from fathomlm.errors import OptionError, is_number, require
from fathomlm.options import check, option

ONE_EXIT = ("gap", "max", "state", "classifier")
"""Confidences that one exit has by itself; the others depend on the exits before it."""
CONFIDENCES = (*ONE_EXIT, "gate", "kl")
Mode = Literal["full", "static", "state-copy", "entry-copy", "parallel", "speculative", "select", "oracle", "oracle-copy"]
MODES: tuple[str, ...] = get_args(Mode)
USED: dict[str, tuple[str, ...]] = {
    "full": (),
    "static": ("exit_layers",),
    "state-copy": ("exit_layers", "min_exit_layer", "confidence", "threshold", "decay"),
    "entry-copy": ("exit_layers", "confidence", "threshold"),
    "parallel": ("exit_layers", "confidence", "threshold", "refine", "max_stack"),
    "speculative": ("exit_layers", "confidence", "threshold", "max_stack", "draft_tree", "draft_best"),
    "select": ("exit_layers", "min_exit_layer", "confidence", "threshold"),
    "oracle": ("exit_layers", "min_exit_layer", "confidence", "threshold"),
    "oracle-copy": ("exit_layers", "min_exit_layer", "confidence", "threshold"),
}
"""The options that each mode has."""
OPTIONS = (
    "exit_layers", "confidence", "threshold", "min_exit_layer", "decay", "refine", "max_stack", "draft_tree", "draft_best",
)  # fmt: skip
"""What is asked for beside the mode."""
ORACLES = ("oracle", "oracle-copy")
"""The modes that know the last layer's choice, and compare no threshold."""
SERVED_MODES = ("static", "parallel", "state-copy", "entry-copy", "speculative")
"""The modes of the engine, beside full."""
MULTIPLE = ("state-copy", "entry-copy", "parallel", "select", *ORACLES)
"""The modes with any number of exits; the others have one."""
DEFAULT_THRESHOLD = 0.9
DEFAULT_STACK = 16
MOST_DRAFTS = 63
"""Of a tree: what a row sees of it is one number of 64 bits."""
BEAM = 8
"""Drafts of each level that more are looked for behind, where the likeliest of a tree are verified."""
DRAFT_STACKS = {"cpu": 3}
DRAFT_STACK = 4
"""Of a draft layer, where nobody says, on a CPU and elsewhere: two or three drafts and the token before them, which was best
for SmolLM2-135M. It drafts whatever it thinks of them. On a CPU a product of four rows takes twice as long as of three."""
DRAFT_BESTS = {"cuda": (15, 5)}
"""Where one sequence runs at a time: the likeliest of a tree, with the last token as many rows as a tensor core multiplies
at once. A sixth level keeps more of SmolLM2-135M's drafts (3.73 tokens a pass instead of 3.59), but costs more."""


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold that learns while decoding, such as `ThresholdEstimator` (thesis 2.5.3)."""

    @property
    def threshold(self) -> float:
        """The one in force."""
        ...

    def observe(self, confidences: Sequence[float], agreements: Sequence[bool]) -> None:
        """Confidences at an exit, and whether the most likely token there was the full model's too."""
        ...

    def end_sequence(self) -> None:
        """A sequence is over."""
        ...


Threshold = float | tuple[float, ...]
"""One for all exits, or one for each."""


def parse_threshold(text: str, flag: str) -> Threshold | str:
    """A flag's number, or several such as 0.9,0.8, or the word `adaptive`."""
    if text == "adaptive":
        return text
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(0 <= number <= 1 for number in numbers):
        raise OptionError(f"{flag} must be between 0 and 1, or adaptive, got '{text}'")
    return numbers if len(numbers) > 1 else numbers[0]


def thresholds_of(threshold: Threshold, exits: int) -> tuple[float, ...]:
    """By exit."""
    return threshold if isinstance(threshold, tuple) else (threshold,) * exits


def shown_threshold(threshold: Threshold) -> str:
    """For people, as it is given."""
    return ",".join(f"{one:.2f}" for one in thresholds_of(threshold, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exiting:
    """Early exit: how, where and when. Fields that are None get their mode's default, where it has one."""

    mode: Mode = option(
        choices=MODES, flag="--decode", metavar="MODE",
        help="what happens at an exit: full never exits; static always does; state-copy gives deeper layers the exit's "
        "state (CALM); entry-copy gives deeper loops the keys and values of the loop where a token "
        "exited; parallel runs them later, several tokens at once (FREE); speculative lets the full model verify what "
        "the exit drafted; select runs every layer and takes the first confident exit's choice; oracle exits as soon as the "
        "last layer's choice is reached, and oracle-copy gives deeper layers the state there. full, speculative and oracle "
        "keep the full model's output",
    )  # fmt: skip
    exit_layers: tuple[int, ...] | None = option(
        None, ge=1, flag="--exit-layer", metavar="N", default_text="the model's own exits",
        help="exit after layer N, counted from 1 in unrolled depth; several as 4,8 or by repeating the flag",
    )  # fmt: skip
    confidence: str | None = option(
        None, choices=CONFIDENCES, default_text="gap", help="what is compared with the threshold"
    )
    threshold: Threshold | AdaptiveThreshold | None = option(
        None, ge=0, le=1, metavar="T", parse=parse_threshold,
        default_text=f"{DEFAULT_THRESHOLD:g}, for a draft layer 0; a shipped exit's own",
        help="exit where the confidence exceeds T, from 0 (always) to 1 (never); one for each exit as 0.9,0.8; 'adaptive' "
        "estimates T while decoding",
    )  # fmt: skip
    """An estimator's threshold is read once a batch; what it learns from the batch holds for the next."""
    min_exit_layer: int | None = option(
        None, ge=1, metavar="N", help="state-copy, select, oracle, oracle-copy: every layer from N on is an exit"
    )
    decay: float | None = option(
        None, ge=0, metavar="TAU",
        help="state-copy: the threshold falls over the sequence, 0.9 T + 0.1 exp(-TAU i / max new tokens) at token i (CALM)",
    )  # fmt: skip
    refine: float | None = option(
        None, ge=0, finite=False, metavar="T",
        help="parallel: go back to a token whose -log p under the full model exceeds T; 0 is strictest",
    )  # fmt: skip
    max_stack: int | None = option(
        None, ge=1, metavar="K",
        default_text=f"{DEFAULT_STACK}; for a draft layer {DRAFT_STACK}, on a CPU {DRAFT_STACKS['cpu']}",
        help="parallel, speculative: at most K tokens wait for the deeper layers",
    )  # fmt: skip

    draft_tree: tuple[int, ...] | None = option(
        None, ge=1, metavar="K", default_text="none: see --draft-best and --max-stack",
        help="speculative with a draft layer: K drafts behind each token, place by place; 4,2,1 are 4 first drafts, 2 "
        "behind each of them and 1 behind each of those",
    )  # fmt: skip

    draft_best: tuple[int, ...] | None = option(
        None, ge=1, metavar="N,D",
        default_text="15,5 for one sequence on a GPU, else one draft after the other, as --max-stack says",
        help="speculative with a draft layer: of a tree that is up to D drafts deep, the N likeliest are verified",
    )  # fmt: skip

    unset: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)
    """What has its default."""

    def __post_init__(self) -> None:
        layers = self.exit_layers
        if layers is not None:
            layers = tuple(layers) if isinstance(layers, list | tuple) else (layers,)
            object.__setattr__(self, "exit_layers", layers)
        check(self)
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in USED[self.mode]:
                users = _listed([mode for mode in MODES if name in USED[mode]])
                raise OptionError(f"{name} cannot be combined with {self.mode} decoding, only with {users}")
        self._check_tree()
        for name, value in (("confidence", "gap"), ("threshold", DEFAULT_THRESHOLD), ("max_stack", DEFAULT_STACK)):
            unset = name in USED[self.mode] and getattr(self, name) is None
            unset = unset and not (name == "max_stack" and self.tree_depth)
            if unset and not (name == "threshold" and self.mode in ORACLES):
                object.__setattr__(self, name, value)
                object.__setattr__(self, "unset", (*self.unset, name))
        if self.confidence == "kl" and self.mode != "entry-copy":
            raise OptionError(f"confidence 'kl' requires entry-copy decoding, got {self.mode}")
        self._check_layers()
        self._check_threshold()

    def _check_tree(self) -> None:
        tree, best = self.draft_tree, self.draft_best
        if tree is None and best is None:
            return
        name = "draft_tree" if best is None else "draft_best"
        if tree is not None and best is not None:
            raise OptionError("draft_best cannot be combined with draft_tree")
        if self.max_stack is not None or self.exit_layers is not None:
            layers = "exit_layers: it requires a draft layer behind the model"
            raise OptionError(f"{name} cannot be combined with {layers if self.max_stack is None else 'max_stack'}")
        if tree is not None and not 0 < (drafts := sum(accumulate(tree, mul))) <= MOST_DRAFTS:
            raise OptionError(f"draft_tree must make 1 to {MOST_DRAFTS} drafts, got {drafts:,} of {tree}")
        if best is not None and not (len(best) == 2 and 0 < best[0] <= best[1] * BEAM <= MOST_DRAFTS):
            most = f"at most {MOST_DRAFTS // BEAM} levels and {BEAM} drafts for each"
            raise OptionError(f"draft_best must be two numbers, {most}, got {best}")

    @property
    def tree_depth(self) -> int:
        """Levels of a tree of drafts; 0 where drafts are a chain."""
        return len(self.draft_tree or ()) if self.draft_best is None else self.draft_best[1]

    @property
    def tree_nodes(self) -> int:
        """Entries of a tree of drafts, the last settled token's included; 0 where drafts are a chain."""
        if self.draft_best is not None:
            return 1 + BEAM * self.draft_best[1]
        return 0 if self.draft_tree is None else 1 + sum(accumulate(self.draft_tree, mul))

    def _check_layers(self) -> None:
        layers = self.exit_layers
        if layers is not None:
            require(bool(layers), "exit_layers", "one or more layers, counted from 1", layers)
            object.__setattr__(self, "exit_layers", tuple(sorted(set(layers))))
        if self.min_exit_layer is not None and layers is not None:
            raise OptionError("exit_layers and min_exit_layer cannot be combined")

    def _check_threshold(self) -> None:
        threshold = self.threshold
        if threshold is None or isinstance(threshold, AdaptiveThreshold):
            return
        if self.mode in ORACLES:
            raise OptionError(
                "threshold cannot be combined with the oracle; give an estimator to have it learn from the oracle"
            )
        each = threshold if isinstance(threshold, tuple) else (threshold,)
        inside = bool(each) and all(is_number(one) and 0 <= one <= 1 for one in each)
        require(inside, "threshold", "between 0 and 1, or an estimator", threshold)

    @property
    def estimator(self) -> AdaptiveThreshold | None:
        """What learns the threshold, where something does."""
        return self.threshold if isinstance(self.threshold, AdaptiveThreshold) else None

    def threshold_now(self) -> Threshold | None:
        """What is in force; None where the mode compares none."""
        threshold = self.threshold
        if self.mode in ORACLES or threshold is None:
            return None
        if isinstance(threshold, tuple):
            return threshold
        return float(threshold.threshold if isinstance(threshold, AdaptiveThreshold) else threshold)

    def decayed(self, threshold: float, index: int, most: int) -> float:
        """What holds at a token of a sequence of at most `most`, from 0: early mistakes cost more tokens than late ones
        (CALM, Schuster et al. 2022, section 3.5)."""
        if self.decay is None:
            return threshold
        return min(1.0, 0.9 * threshold + 0.1 * math.exp(-self.decay * index / most))

    def exits(self, plan: DepthPlan) -> tuple[int, ...]:
        """The indices of the steps after which a token of this model may exit, the last step left out."""
        if plan.routing is not None:
            raise OptionError(
                f"{self.mode} decoding cannot be combined with a router, which already chooses each token's depth"
            )
        if self.mode == "full":
            return ()
        if plan.injection and self.mode != "entry-copy":
            raise OptionError(f"{self.mode} decoding cannot be combined with an injection in each loop; entry-copy can")
        if self.drafts_behind(plan):
            if self.confidence not in ("gap", "max"):
                raise OptionError(f"a draft layer supports only confidence 'gap' and 'max', got '{self.confidence}'")
            return ()
        if self.tree_depth:
            name = "draft_tree" if self.draft_best is None else "draft_best"
            raise OptionError(f"{name} requires a model with a draft layer behind it; this one has none")
        layers = self._layers(plan)
        check_exit_layers(plan, layers)
        if len(layers) > 1 and (self.mode not in MULTIPLE or self.refine is not None):
            refines = " with refine" if self.refine is not None else ""
            raise OptionError(
                f"{self.mode} decoding{refines} has one exit, and here are {len(layers)}, after layers {_listed(layers)}; "
                f"name one of them as the exit layer, such as {layers[0]}"
            )
        if isinstance(self.threshold, tuple) and len(self.threshold) != len(layers):
            raise OptionError(
                f"threshold must be one number, or one for each exit: {len(self.threshold)} given, and "
                f"{len(layers)} exit(s), after layer {_listed(layers)}"
            )
        exits = tuple(layer - 1 for layer in layers)
        if self.mode == "entry-copy":
            _check_loops(plan, exits)
        return exits

    def drafts_behind(self, plan: DepthPlan) -> bool:
        """Whether drafts come from a draft layer behind the model, and not from an exit in it."""
        return self.mode == "speculative" and plan.draft and self.exit_layers is None

    def most_waiting(self, plan: DepthPlan) -> int:
        """How many tokens of a sequence wait for one pass, into which they must fit; 1 where none waits. The drafts of a
        draft layer have rows beside those of a batch."""
        waits = self.mode in ("parallel", "speculative") and not self.drafts_behind(plan)
        return (self.max_stack or DEFAULT_STACK) if waits else 1

    def for_plan(self, plan: DepthPlan, device: str, sequences: int | None = None) -> Exiting:
        """The same with a draft layer's defaults on a type of device, where drafts come from one, for so many sequences at a
        time."""
        stack, best = DRAFT_STACKS.get(device, DRAFT_STACK), DRAFT_BESTS.get(device) if sequences == 1 else None
        defaults = {"threshold": 0.0, "max_stack": stack if best is None else None} if self.drafts_behind(plan) else {}
        own: dict[str, Any] = {name: value for name, value in defaults.items() if name in self.unset}
        if "max_stack" in own and best is not None:
            own["draft_best"] = best
        return replace(self, **own) if own else self

    def own_steps(self, plan: DepthPlan) -> tuple[Step, ...]:
        """What runs beside the plan's steps: the layers of exits, or a draft layer."""
        return (plan.draft_step,) if self.drafts_behind(plan) else plan.exit_steps(self.exits(plan))

    def _layers(self, plan: DepthPlan) -> Sequence[int]:
        if self.exit_layers is not None:
            return self.exit_layers
        if self.min_exit_layer is not None:
            # The last layer itself when it is too high, so that the caller refuses it by its number.
            return range(self.min_exit_layer, max(plan.unrolled_layers, self.min_exit_layer + 1))
        own = plan.recursion_ends() if plan.injection else plan.exits
        if own:
            return tuple(index + 1 for index in own)
        has = "has a draft layer, for speculative decoding, and no exits" if plan.draft else "has no exits of its own"
        raise OptionError(f"this model {has}; give an exit layer: {_suggestion(plan)}")


def check_exit_layers(plan: DepthPlan, layers: Iterable[int]) -> None:
    """Refuse layers, counted from 1, behind which the model has none."""
    last = plan.unrolled_layers
    for layer in layers:
        if not 1 <= layer < last:
            raise OptionError(f"exit layers must be between 1 and {last - 1} for this model's {last} layers, got {layer}")


def _check_loops(plan: DepthPlan, exits: Sequence[int]) -> None:
    """Refuse exits of entry-copy decoding behind which there is no loop that could read the entries of the one before."""
    loops_end = plan.recursion_ends() if plan.loops else ()
    others = sorted(index + 1 for index in set(exits) - set(loops_end))
    if others or plan.exit_layer or plan.kv != "cache" or (plan.ends[1] and not plan.injection):
        at = f"; layer {others[0]} is not one" if others else ""
        raise OptionError(
            "entry-copy decoding requires exits at the ends of loops, without layers of their own, a coda or shared "
            f"keys and values{at}"
        )


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
