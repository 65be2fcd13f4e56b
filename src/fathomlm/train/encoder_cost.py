"""What an encoder costs beside its decoder: weights that a source token meets, FLOPs, and memory for the backward pass.

The rules are those of `fathomlm.depth.cost`, with attention over the whole source; LongT5's is over its neighbourhood and
one key for each global block. A row of pairs is counted as source_length + target_length tokens: the encoder runs for the
first, the decoder for the second, and what stands here is spread over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import OF_THE_SOURCE
from fathomlm.train.recipe import DataRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCost:
    layers: int
    hidden: int
    heads: int
    inner: int
    """All heads together."""
    intermediate: int
    gated: bool
    radius: int | None
    """LongT5: how far a token sees to each side."""
    block: int | None
    """LongT5 with transient globals: tokens that one global key stands for."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> EncoderCost:
        """From what `fathomlm.model.encoder.encoder_record` says."""
        globals_ = record.get("encoder_attention_type") == "transient-global"
        return cls(
            layers=record["num_layers"],
            hidden=record["d_model"],
            heads=record["num_heads"],
            inner=record["num_heads"] * record["d_kv"],
            intermediate=record["d_ff"],
            gated=str(record["feed_forward_proj"]).startswith("gated"),
            radius=record.get("local_radius"),
            block=record["global_block_size"] if globals_ else None,
        )

    @property
    def weights(self) -> int:
        """Of all linears."""
        return self.layers * self.hidden * (4 * self.inner + (3 if self.gated else 2) * self.intermediate)

    def keys(self, source: int) -> int:
        """Keys that a token's scores are computed for. LongT5 looks at whole blocks: its own and one to each side."""
        if self.radius is None:
            return source
        return min(source, 3 * (self.radius + 1)) + (0 if self.block is None else source // self.block)

    def forward_flops(self, source: int) -> int:
        """For each token of a source of that length."""
        return 2 * self.weights + 4 * self.layers * self.inner * self.keys(source)

    def activation_bytes(self, source: int, wide: int, *, kept: bool, recomputed: bool) -> int:
        """What autograd keeps of a source token, about: products in `wide` bytes, norms in float32, and for every head and
        key a position bias (LongT5: the scores too). `recomputed` keeps what enters each layer, and one layer whole; a
        frozen encoder (not `kept`) needs that one layer only."""
        norms = 2 * (8 + wide) * self.hidden
        scores = (1 if self.radius is None else 3) * wide * self.heads * self.keys(source)
        layer = norms + 4 * wide * self.inner + scores + wide * self.intermediate * (5 if self.gated else 2)
        if not kept:
            return layer
        return layer + self.layers * 4 * self.hidden if recomputed else self.layers * layer


def over_both(data: DataRecipe, target: int, source: int) -> int:
    """The mean over a row's tokens of something that each target token and each source token has."""
    S, T = data.source_length, data.target_length
    return round((target * T + source * S) / (S + T))


def cross_weights(architecture: Architecture, plan: DepthPlan) -> int:
    """Weights of the decoder that the source's tokens meet: the keys and values of cross-attention."""
    each = sum(linear.inputs * linear.outputs for linear in architecture.linears() if linear.name in OF_THE_SOURCE)
    return each * plan.unrolled_layers
