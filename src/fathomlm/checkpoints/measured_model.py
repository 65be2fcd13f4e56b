"""Which model something was measured on: its sizes, and a few numbers of each layer.

What a pass over text finds of a model's layers holds for that model alone. Given with another one of as many layers it would
not fail: it would drop the wrong layers, and fit weights to activations that never meet them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fathomlm.checkpoints.assemble import BaseCheckpoint
from fathomlm.checkpoints.base_sample import BaseSample
from fathomlm.depth import Architecture

SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "experts", "vocab")
"""What all copies of a model have in common, in whatever format they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A plain model, as far as it has to be known again; copies in other number formats are the same model."""

    shape: Architecture
    samples: tuple[BaseSample, ...]
    """Of each layer: all its vectors, and its smallest matrix, so that little is read."""

    @classmethod
    def of(cls, base: BaseCheckpoint) -> MeasuredModel:
        shapes = base.architecture.layer_shapes()
        matrices = [name for name, shape in shapes.items() if len(shape) > 1]
        names = [name for name, shape in shapes.items() if len(shape) == 1]
        names.append(min(matrices, key=lambda name: math.prod(shapes[name])))
        layers = range(base.architecture.layers)
        samples = (BaseSample.of_tensors([base.tensor(f"layers.{layer}.{name}") for name in names]) for layer in layers)
        return cls(shape=base.architecture, samples=tuple(samples))

    def of_layers(self, layers: Sequence[int]) -> MeasuredModel:
        """The model that has only those."""
        return MeasuredModel(
            shape=self.shape.with_layers(tuple(layers)), samples=tuple(self.samples[layer] for layer in layers)
        )

    def difference(self, base: BaseCheckpoint) -> str | None:
        """What makes `base` another model, in words that follow "another model"; None where it is the same one."""
        for name in SIZES:
            measured, given = getattr(self.shape, name), getattr(base.architecture, name)
            if measured != given:
                return f"with {name} {measured:,}, and this one has {given:,}"
        found = BaseSample.joined(self.samples).difference(BaseSample.joined(MeasuredModel.of(base).samples))
        return None if found is None else f"of the same shape: {found}"
