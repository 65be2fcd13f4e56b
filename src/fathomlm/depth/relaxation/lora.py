"""LoRA and DoRA: low-rank deltas B A on linears, and offsets for norms and biases (thesis 3.3.3).

They relax a tie, so only steps whose layer is shared have them. To fine-tune a plain model, where nothing is tied, they may
be put `everywhere`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fathomlm.depth.architecture import LINEARS, Architecture, LinearSpec
from fathomlm.depth.bounds import check_size
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation.kind import RelaxationKind, RelaxationSettings
from fathomlm.depth.steps import Step
from fathomlm.errors import OptionError, choices


class Lora(RelaxationKind):
    """h = W x + B A x."""

    module = "fathomlm.model.relax.lora:LoraStep"
    options = ("ranks", "vectors", "everywhere")
    init = "average"
    relax_inits = ("svd", "zero", "aware")
    exports = True

    def check(self, relaxation: RelaxationSettings) -> None:
        if not relaxation.ranks:
            raise OptionError(f"{relaxation.kind} requires a rank, such as 64 or q=64,kv=128,ffn=256")
        for name, rank in relaxation.ranks.items():
            if name not in LINEARS:
                raise OptionError(choices("linear", name, LINEARS))
            if check_size("rank", rank, called=f"the rank on {name}") < 1:
                raise OptionError(f"the rank on {name} must be >= 1, got {rank}")

    def check_plan(self, relaxation: RelaxationSettings, plan: DepthPlan) -> None:
        if plan.recursions == 1 and not relaxation.everywhere:
            raise OptionError(f"{relaxation.kind} relaxes a tie, but with one recursion nothing is tied; give 2 or more")

    def sits_on(self, relaxation: RelaxationSettings, plan: DepthPlan, step: Step) -> bool:
        return relaxation.everywhere or plan.is_shared(step)

    def shapes(self, relaxation: RelaxationSettings, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        for linear in architecture.linears():
            yield from self.linear_shapes(linear, relaxation.rank(linear))
        if relaxation.vectors:
            yield from ((width,) for width in architecture.vectors().values())

    def linear_shapes(self, linear: LinearSpec, rank: int) -> Iterator[tuple[int, ...]]:
        """A and B on one linear."""
        if rank:
            yield (rank, linear.inputs)
            yield (linear.outputs, rank)

    def linear_weights(self, relaxation: RelaxationSettings, linear: LinearSpec) -> int:
        return relaxation.rank(linear) * (linear.inputs + linear.outputs)

    def describe(self, relaxation: RelaxationSettings) -> str:
        low, high = min(relaxation.ranks.values()), max(relaxation.ranks.values())
        return f"{relaxation.kind} rank {low if low == high else f'{low} to {high}'}"


class Dora(Lora):
    """LoRA with a learned length for each output row (thesis appendix, Table of KV relaxations)."""

    module = "fathomlm.model.relax.lora:DoraStep"

    def linear_shapes(self, linear: LinearSpec, rank: int) -> Iterator[tuple[int, ...]]:
        yield from super().linear_shapes(linear, rank)
        if rank:
            yield (linear.outputs,)
