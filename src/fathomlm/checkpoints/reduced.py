"""Base checkpoints that are made smaller while they are read: fewer layers, layers that run several times, narrower ones,
fewer tokens.

Where a layer adds f(x) to the residual stream, R visits that add f(x) / R each follow the same path in smaller steps: the
looped model starts near the one without a loop, in the same bytes, and learns to use the visits. So what a shared layer
writes to the stream (its output projections) is divided by R; no step has parameters of its own.

Narrower feed-forward parts are the baseline in width that dropping layers is in depth. A layer keeps the neurons that add
most to the residual stream: by E[h^2] |w|^2, with h a neuron's activation over the calibration text and w its column of
`down`. What the others added is then given to those that stay, as far as it can be: W' = W C_K (C_KK)^-1 minimises the mean
of |W h - W' h_K|^2, with C the second moments of h and K the kept neurons. The result is an ordinary model with a smaller
`intermediate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.assemble import BaseCheckpoint, TokenIds
from fathomlm.checkpoints.tied import ROWS
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.dropping import check_repeat, repeated_layers, repeated_plan, with_neurons, with_vocab
from fathomlm.model.relax.lora import damped

DOWN = "mlp.down"
WRITERS = ("attn.o", DOWN)
"""The linears of a layer that write to the residual stream."""


class _Reduced:
    """A base checkpoint in another shape, with the base's tokens and encoder."""

    def __init__(self, base: BaseCheckpoint, architecture: Architecture, plan: DepthPlan) -> None:
        self.base, self.architecture, self.plan = base, architecture, plan
        self.dtype = base.dtype
        self.tokens: TokenIds = base.tokens
        self.encoder = base.encoder

    def tensor(self, name: str) -> Tensor:
        """A layer's tensor as `_of_layer` makes it; all else is the base's."""
        head, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        return self._of_layer(int(number), inner) if head == "layers" else self.base.tensor(name)

    def _of_layer(self, layer: int, name: str) -> Tensor:
        raise NotImplementedError

    def tokenizer(self) -> Any | None:
        return self.base.tokenizer()


class KeptLayers(_Reduced):
    """A base checkpoint with some of its layers, perhaps several times."""

    def __init__(self, base: BaseCheckpoint, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        super().__init__(base, base.architecture.with_layers(self.layers), DepthPlan.vanilla(len(self.layers)))

    def _of_layer(self, layer: int, name: str) -> Tensor:
        return self.base.tensor(f"layers.{self.layers[layer]}.{name}")


class RepeatedLayers(KeptLayers):
    """A plain base checkpoint with its inner layers `times` times in a row, each writing its part."""

    def __init__(self, base: BaseCheckpoint, times: int) -> None:
        check_repeat(base.architecture, times)
        super().__init__(base, repeated_layers(base.architecture.layers, times))
        self.times = times
        self.looped = repeated_plan(base.architecture.layers, times)

    def _of_layer(self, layer: int, name: str) -> Tensor:
        tensor = super()._of_layer(layer, name)
        if name.rpartition(".")[0] not in WRITERS or self.layers.count(self.layers[layer]) == 1:
            return tensor
        return (tensor.float() / self.times).to(tensor.dtype)


class KeptTokens(_Reduced):
    """A base checkpoint with some of its tokens, numbered in their order, and the tokenizer of those."""

    def __init__(self, base: BaseCheckpoint, tokens: Sequence[int], tokenizer: Any) -> None:
        super().__init__(base, with_vocab(base.architecture, len(tokens)), DepthPlan.vanilla(base.architecture.layers))
        numbers: dict[int | None, int] = {token: number for number, token in enumerate(tokens)}
        ids = base.tokens  # configurations also name ids that no token has
        eos = tuple(numbers[token] for token in ids.eos if token in numbers)
        self.tokens = TokenIds(bos=numbers.get(ids.bos), eos=eos, pad=numbers.get(ids.pad))
        self.kept, self._tokenizer = tuple(tokens), tokenizer

    def tensor(self, name: str) -> Tensor:
        tensor = self.base.tensor(name)
        return tensor[torch.tensor(self.kept)] if name in ("embed.weight", "head.weight") else tensor

    def tokenizer(self) -> Any:
        return self._tokenizer


class KeptNeurons(_Reduced):
    """A plain base checkpoint whose layers have `neurons` feed-forward neurons each. `activations` are of its layers."""

    def __init__(self, base: BaseCheckpoint, neurons: int, activations: Activations) -> None:
        super().__init__(base, with_neurons(base.architecture, neurons), base.plan)
        self.activations = activations
        self._kept: dict[int, Tensor] = {}

    def _of_layer(self, layer: int, name: str) -> Tensor:
        tensor, (path, _, end) = self.base.tensor(f"layers.{layer}.{name}"), name.rpartition(".")
        if self.architecture.intermediate == self.base.architecture.intermediate:
            return tensor
        if path in ROWS:
            return tensor[self._neurons(layer)]
        if path == DOWN and end == "weight":
            return refitted(tensor, self.activations.moment(layer, "down"), self._neurons(layer)).to(tensor.dtype)
        return tensor

    def _neurons(self, layer: int) -> Tensor:
        if layer not in self._kept:
            down = self.base.tensor(f"layers.{layer}.{DOWN}.weight")
            moment = self.activations.moment(layer, "down")
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
