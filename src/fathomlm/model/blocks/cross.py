"""Attention over an encoder's output between the two halves: T5, mT5 and LongT5 decoders (thesis 2).

Shapes: B batch, T tokens, S tokens of the source, D head width, M hidden width, E the encoder's width.
"""

from __future__ import annotations

from torch import Tensor, nn

from fathomlm.cache import Entries
from fathomlm.depth import Architecture
from fathomlm.kernels.attention import attention, split_heads
from fathomlm.model.blocks.parts import Block, StepContext, build_linear, build_norm


class CrossAttention(nn.Module):
    """Queries from the stream, keys and values from the encoder's output; no positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        specs = [spec for spec in architecture.linears() if spec.name.startswith("cross_")]
        self.q, self.k, self.v, self.o = (build_linear(spec) for spec in specs)
        self.head_dim = architecture.head_dim
        self.scale = architecture.scale

    def forward(self, x_BTM: Tensor, step: StepContext) -> Tensor:
        """What the tokens gather from the source, from the normed stream."""
        assert step.memory is not None
        q = self._heads(step.project("cross_q", self.q, x_BTM))
        k, v = step.memory.entries(lambda states_BSE: self._entries(states_BSE, step))
        mixed = attention(q, k, v, scale=self.scale, mask=step.memory.mask, causal=False)
        return step.project("cross_o", self.o, mixed.transpose(1, 2).flatten(2))

    def _entries(self, states_BSE: Tensor, step: StepContext) -> Entries:
        k = self._heads(step.project("cross_k", self.k, states_BSE))
        return k, self._heads(step.project("cross_v", self.v, states_BSE))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)


class CrossBlock(Block):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.cross = CrossAttention(architecture)
        self.norm_cross = build_norm(architecture)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attn.behind(self.norm_attn, x, step)
        x = x + self.cross(step.norm("norm_cross", self.norm_cross, x), step)
        return self.mlp.behind(self.norm_mlp, x, step)
