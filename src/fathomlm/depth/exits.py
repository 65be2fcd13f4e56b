"""What an early exit may have of its own, beside the final norm and the head that all outputs share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fathomlm.depth.architecture import Architecture
from fathomlm.depth.bounds import check_flag, check_size
from fathomlm.depth.plan import DepthPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitParts:
    """The same for every exit of a model."""

    head_rank: int = 0
    """A low-rank delta on the head (thesis 3, early-exit appendix)."""
    adapter_rank: int = 0
    """A low-rank adapter on the residual stream, in front of the final norm."""
    layer: bool = False
    """A whole layer over the states at the exit, with keys and values of its own."""
    classifier: bool = False
    """A linear that tells whether the exit chooses what the last output will."""

    def __post_init__(self) -> None:
        for name in ("head_rank", "adapter_rank"):
            check_size("rank", getattr(self, name), called=f"the {name} of exits")
        for name in ("layer", "classifier"):
            check_flag(f"the {name} of exits", getattr(self, name))

    def __bool__(self) -> bool:
        return bool(self.head_rank or self.adapter_rank or self.layer or self.classifier)

    def shapes(self, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        """The tensors of one exit."""
        if self.head_rank:
            yield from ((self.head_rank, architecture.hidden), (architecture.vocab, self.head_rank))
        if self.adapter_rank:
            yield (architecture.hidden,)
            yield from ((self.adapter_rank, architecture.hidden), (architecture.hidden, self.adapter_rank))
        if self.layer:
            yield from ((linear.outputs, linear.inputs) for linear in architecture.linears())
            yield from ((width,) for width in architecture.vectors().values())
        if self.classifier:
            yield from ((1, architecture.hidden), (1,))

    def parameters(self, architecture: Architecture, plan: DepthPlan) -> int:
        """What all exits of a plan have together."""
        return len(plan.exits) * sum(math.prod(shape) for shape in self.shapes(architecture))
