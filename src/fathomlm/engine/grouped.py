"""What rows of different recursions add to one shared layer, each its own (thesis 3.3: depth-wise LoRA).

Shapes: N rows, D recursions, W rows of a weight, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fathomlm.kernels.grouped_lora import add_grouped_lora
from fathomlm.model.relax import LoraDelta, StepDelta


class GroupedDelta:
    """Stands where a layer's `StepDelta` stands. Low-rank deltas are added by one grouped product; whatever else a step may
    add is computed for every recursion and each row takes its own."""

    prefix: Tensor | None = None

    def __init__(self, deltas: Sequence[StepDelta]) -> None:
        self._deltas = deltas
        self._stacks = {name: stack for name in deltas[0].linears if (stack := _stack(deltas, name)) is not None}
        self._shifts = any(delta.offsets for delta in deltas)
        self._recursion_N = torch.empty(0)

    @classmethod
    def build(cls, deltas: Sequence[StepDelta | None]) -> GroupedDelta | None:
        """For all uses of one layer; None where they add nothing."""
        found = [delta for delta in deltas if delta is not None]
        if not found:
            return None
        assert len(found) == len(deltas), "every use of a relaxed layer has its own delta"
        return cls(found)

    def at(self, recursion_N: Tensor) -> GroupedDelta:
        """The same, for rows of these recursions."""
        self._recursion_N = recursion_N
        return self

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        if name not in self._stacks or self._shifts:
            return self._select([delta.project(name, linear, x) for delta in self._deltas])
        out_N1W: Tensor = linear(x)
        add_grouped_lora(out_N1W[:, 0], x[:, 0], *self._stacks[name], self._recursion_N)
        return out_N1W

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        if not self._shifts:
            out: Tensor = module(x)
            return out
        return self._select([delta.norm(name, module, x) for delta in self._deltas])

    def _select(self, each: Sequence[Tensor]) -> Tensor:
        """Row by row that of its recursion."""
        stacked = torch.stack(list(each), dim=1)
        at = self._recursion_N.view(-1, *[1] * (stacked.dim() - 1)).expand(-1, 1, *stacked.shape[2:])
        return stacked.gather(1, at)[:, 0]


def _stack(deltas: Sequence[StepDelta], name: str) -> tuple[Tensor, Tensor] | None:
    """A and B of all recursions; None where a delta is of another kind."""
    low = [delta.linears[name] for delta in deltas]
    found = [one for one in low if type(one) is LoraDelta]
    if len(found) != len(low):
        return None
    return torch.stack([one.a.detach() for one in found]), torch.stack([one.b.detach() for one in found])
