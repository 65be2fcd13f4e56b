"""A model whose layers run several times in place, in smaller steps.

Where a layer adds f(x) to the residual stream, R visits that add f(x) / R each follow the same path in smaller steps: the
looped model starts near the one without a loop, in the same bytes, and learns to use the visits. So what a shared layer
writes to the stream (its output projections) is divided by R; no step has parameters of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fathomlm.checkpoints.assemble import BaseCheckpoint, TokenIds
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.plan import check_repeat, repeated_layers, repeated_plan

WRITERS = ("attn.o", "mlp.down")
"""The linears of a layer that write to the residual stream."""


class RepeatedLayers:
    """A plain base checkpoint with its inner layers `times` times in a row, each writing its part."""

    def __init__(self, base: BaseCheckpoint, times: int) -> None:
        check_repeat(base.architecture, times)
        self.base, self.times = base, times
        self.looped = repeated_plan(base.architecture.layers, times)
        self.layers = repeated_layers(base.architecture.layers, times)
        self.architecture: Architecture = base.architecture.with_layers(self.layers)
        self.plan = DepthPlan.vanilla(len(self.layers))
        self.dtype = base.dtype
        self.tokens: TokenIds = base.tokens
        self.encoder = base.encoder

    def tensor(self, name: str) -> Tensor:
        head, _, rest = name.partition(".")
        if head != "layers":
            return self.base.tensor(name)
        number, _, inner = rest.partition(".")
        layer = self.layers[int(number)]
        tensor = self.base.tensor(f"layers.{layer}.{inner}")
        shared = self.layers.count(layer) > 1 and inner.rpartition(".")[0] in WRITERS
        return (tensor.float() / self.times).to(tensor.dtype) if shared else tensor

    def tokenizer(self) -> Any | None:
        return self.base.tokenizer()
