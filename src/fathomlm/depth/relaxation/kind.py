"""What every kind of relaxation answers: its options, its sizes, what it costs, and which module it runs as.

A kind is one object without state. `Relaxation` holds the settings that a model was given and hands them to the methods
below; the counters, the converter, the trainer and the engine ask nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fathomlm.depth.architecture import Architecture, LinearSpec
from fathomlm.depth.bounds import size
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.steps import Step
from fathomlm.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxationSettings:
    """What a kind reads of a `Relaxation`."""

    kind: str
    ranks: Mapping[str, int] = field(default_factory=dict)
    """lora, dora: the rank on each linear, before it is capped by the matrix; a linear not named here has none."""
    prefix_length: int = size("prefix_length", 0)
    """prefix: how many vectors each step has."""
    vectors: bool = option(True)
    """lora, dora: whether a step also has offsets for norms and biases. No product of matrices can restore those, so
    without them even full rank does not give the original model back; they are about a thousandth of its parameters."""
    everywhere: bool = option(False)
    """lora, dora: on every step, not only where a layer is shared."""

    def rank(self, linear: LinearSpec) -> int:
        """The rank on a linear, capped by the matrix (Gemma's k and v are 256 wide); 0 where it has none."""
        return min(self.ranks.get(linear.name, 0), linear.inputs, linear.outputs)


class RelaxationKind:
    """A kind that adds nothing: what a new kind starts from."""

    module = "fathomlm.model.relax:StepDelta"
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

    def check(self, relaxation: RelaxationSettings) -> None:
        """Refuse settings out of bounds."""

    def check_plan(self, relaxation: RelaxationSettings, plan: DepthPlan) -> None:
        """Refuse a plan that has no place for it."""

    def sits_on(self, relaxation: RelaxationSettings, plan: DepthPlan, step: Step) -> bool:
        """Whether a step has tensors of its own. By default where its layer is shared: a relaxation relaxes a tie."""
        return plan.is_shared(step)

    def shapes(self, relaxation: RelaxationSettings, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        """The tensors that one step has of its own."""
        yield from ()

    def linear_weights(self, relaxation: RelaxationSettings, linear: LinearSpec) -> int:
        """Weights that a step multiplies beside those of one linear: half of the FLOPs that it adds for each token."""
        return 0

    def extra_keys(self, relaxation: RelaxationSettings) -> int:
        """Keys that every token of a step sees beside those of tokens."""
        return 0

    def describe(self, relaxation: RelaxationSettings) -> str:
        return relaxation.kind
