"""What early exits have of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fathomlm.depth.architecture import Architecture
from fathomlm.depth.bounds import size
from fathomlm.depth.plan import DepthPlan
from fathomlm.options import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitParts:
    """What an early exit may have of its own, beside the final norm and the head that all outputs share; the same for every
    exit of a model."""

    head_rank: int = size("rank", 0)
    """A low-rank delta on the head (thesis 3, early-exit appendix)."""
    adapter_rank: int = size("rank", 0)
    """A low-rank adapter on the residual stream, before the final norm."""
    layer: bool = False
    """A whole layer over the states at the exit, with keys and values of its own."""
    classifier: bool = False
    """A linear that tells whether the exit chooses what the last output will."""
    draft: bool = False
    """A draft layer behind the model, instead of exits in it."""

    def __post_init__(self) -> None:
        check(self)

    def __bool__(self) -> bool:
        return bool(self.head_rank or self.adapter_rank or self.layer or self.classifier or self.draft)

    def shapes(self, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        """The tensors of one exit, or of the draft layer."""
        if self.head_rank:
            yield from ((self.head_rank, architecture.hidden), (architecture.vocab, self.head_rank))
        if self.adapter_rank:
            yield (architecture.hidden,)
            yield from ((self.adapter_rank, architecture.hidden), (architecture.hidden, self.adapter_rank))
        if self.draft:
            yield from ((architecture.hidden,), (architecture.hidden,), architecture.pair_linear("mix").shape)
        if self.layer or self.draft:
            yield from architecture.layer_shapes().values()
        if self.classifier:
            yield from ((1, architecture.hidden), (1,))

    def parameters(self, architecture: Architecture, plan: DepthPlan) -> int:
        """What all exits of a plan have together."""
        return (len(plan.exits) or plan.draft) * sum(math.prod(shape) for shape in self.shapes(architecture))
