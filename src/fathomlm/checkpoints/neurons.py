"""Feed-forward parts made narrower: the baseline in width that dropping layers is in depth.

A layer keeps the neurons that add most to the residual stream: by E[h^2] |w|^2, with h a neuron's activation over the
calibration text and w its column of `down`. What the others added is then given to those that stay, as far as it can be:
W' = W C_K (C_KK)^-1 minimises the mean of |W h - W' h_K|^2, with C the second moments of h and K the kept neurons. The
result is an ordinary model with a smaller `intermediate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.assemble import BaseCheckpoint, TokenIds
from fathomlm.checkpoints.tied import ROWS
from fathomlm.depth import Architecture
from fathomlm.depth.sharing import with_neurons
from fathomlm.model.relax.lora import damped

DOWN = "mlp.down"


class KeptNeurons:
    """A plain base checkpoint whose layers have `neurons` feed-forward neurons each. `activations` are of its layers."""

    def __init__(self, base: BaseCheckpoint, neurons: int, activations: Activations) -> None:
        self.base, self.activations = base, activations
        self.architecture: Architecture = with_neurons(base.architecture, neurons)
        self.plan = base.plan
        self.dtype = base.dtype
        self.tokens: TokenIds = base.tokens
        self.encoder = base.encoder
        self._kept: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        tensor = self.base.tensor(name)
        head, _, rest = name.partition(".")
        layer, _, inner = rest.partition(".")
        path, _, end = inner.rpartition(".")
        if head != "layers" or self.architecture.intermediate == self.base.architecture.intermediate:
            return tensor
        if path in ROWS:
            return tensor[self._of(layer)]
        if path == DOWN and end == "weight":
            return refitted(tensor, self.activations.moment(int(layer), "down"), self._of(layer)).to(tensor.dtype)
        return tensor

    def tokenizer(self) -> Any | None:
        return self.base.tokenizer()

    def _of(self, layer: str) -> Tensor:
        if layer not in self._kept:
            down = self.base.tensor(f"layers.{layer}.{DOWN}.weight")
            moment = self.activations.moment(int(layer), "down")
            self._kept[layer] = strongest(down, moment, self.architecture.intermediate)
        return self._kept[layer]


def strongest(down_MF: Tensor, moment_FF: Tensor, count: int) -> Tensor:
    """The neurons that add most, in their order."""
    added = moment_FF.diagonal().double() * down_MF.double().square().sum(0)
    return added.topk(count).indices.sort().values


def refitted(down_MF: Tensor, moment_FF: Tensor, kept: Tensor) -> Tensor:
    """The columns of `down` for the kept neurons that come nearest to what all of them put out, in float32."""
    if not moment_FF.any():  # neurons that never fired put out nothing, whatever their columns are
        return down_MF[:, kept].float()
    moments = damped(moment_FF)
    wanted = down_MF.double() @ moments[:, kept]
    solved: Tensor = torch.linalg.solve(moments[kept][:, kept], wanted, left=False)
    return solved.float()
