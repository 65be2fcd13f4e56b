"""A model whose layers run several times in place, in smaller steps.

Where a layer adds f(x) to the residual stream, R visits that add f(x) / R each follow the same path in smaller steps: the
looped model starts near the one without a loop, in the same bytes, and learns to use the visits. So what a shared layer
writes to the stream (its output projections) is divided by R; no step has parameters of its own.
"""

from __future__ import annotations

from torch import Tensor

from fathomlm.checkpoints.assemble import BaseCheckpoint
from fathomlm.checkpoints.tied import KeptLayers
from fathomlm.depth.plan import check_repeat, repeated_layers, repeated_plan

WRITERS = ("attn.o", "mlp.down")
"""The linears of a layer that write to the residual stream."""


class RepeatedLayers(KeptLayers):
    """A plain base checkpoint with its inner layers `times` times in a row, each writing its part."""

    def __init__(self, base: BaseCheckpoint, times: int) -> None:
        check_repeat(base.architecture, times)
        super().__init__(base, repeated_layers(base.architecture.layers, times))
        self.times = times
        self.looped = repeated_plan(base.architecture.layers, times)

    def tensor(self, name: str) -> Tensor:
        tensor, (head, _, rest) = super().tensor(name), name.partition(".")
        number, _, inner = rest.partition(".")
        if head != "layers" or inner.rpartition(".")[0] not in WRITERS or self.layers.count(self.layers[int(number)]) == 1:
            return tensor
        return (tensor.float() / self.times).to(tensor.dtype)
