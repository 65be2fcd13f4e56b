"""What every kind of relaxation answers: its options, its sizes, what it costs, and which module it runs as.

A kind is one object without state. `Relaxation` holds the settings that a model was given and hands itself to the methods
below; the counters, the converter, the trainer and the engine ask nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fathomlm.depth.architecture import Architecture, LinearSpec
from fathomlm.depth.plan import DepthPlan, Step

if TYPE_CHECKING:
    from fathomlm.depth.relaxation import Relaxation


class RelaxationKind:
    """A kind that adds nothing: what a new kind starts from."""

    module = "fathomlm.model.relax.step:StepDelta"
    """The torch half: a subclass of `StepDelta`, imported when a model is built."""
    options: tuple[str, ...] = ()
    """The fields of `Relaxation` that it takes."""
    init = "stepwise"
    """How tied layers start in a conversion, unless the user says."""
    relax_inits: tuple[str, ...] = ()
    """How its own tensors may start in a conversion; none where there is but one way."""
    exports = False
    """Whether what a step adds can be merged into the plain weights of an unrolled export."""
    serves = True
    """Whether the engine can run it."""
    makes_kv = False
    """Whether a step projects keys and values of its own where it reads another step's."""
    per_recursion = False
    """Whether each recursion has a vector that multiplies its output."""

    def check(self, relaxation: Relaxation) -> None:
        """Refuse settings out of bounds."""

    def check_plan(self, relaxation: Relaxation, plan: DepthPlan) -> None:
        """Refuse a plan that has no place for it."""

    def sits_on(self, relaxation: Relaxation, plan: DepthPlan, step: Step) -> bool:
        """Whether a step has tensors of its own. By default where its layer is shared: a relaxation relaxes a tie."""
        return plan.is_shared(step)

    def shapes(self, relaxation: Relaxation, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        """The tensors that one step has of its own."""
        yield from ()

    def linear_weights(self, relaxation: Relaxation, linear: LinearSpec) -> int:
        """Weights that a step multiplies beside those of one linear: half of the FLOPs that it adds for each token."""
        return 0

    def extra_keys(self, relaxation: Relaxation) -> int:
        """Keys that every token of a step sees beside those of tokens."""
        return 0

    def describe(self, relaxation: Relaxation) -> str:
        return relaxation.kind
