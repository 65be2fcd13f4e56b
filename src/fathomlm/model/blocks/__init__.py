"""Own blocks, few and small: ways to wire attention and feed-forward around the residual stream, and an encoder's output
into it.

Shapes: B batch, T tokens, S tokens of the source, D head width, M hidden width, E the encoder's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathomlm.cache import Entries
from fathomlm.depth import Architecture
from fathomlm.kernels.attention import attention, split_heads
from fathomlm.kernels.half import effective_weight
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.blocks.parts import Addition, Block, Packed, StepContext, build_linear, build_norm


class PreNormBlock(Block):
    """Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

    @property
    def packs(self) -> bool:
        return self._plain_halves

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attn.behind(self.norm_attn, x, step)
        return self.mlp.behind(self.norm_mlp, x, step)


class SandwichBlock(Block):
    """Norm before and after each half: Gemma 3, Ouro."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.norm_attn_out = build_norm(architecture)
        self.norm_mlp_out = build_norm(architecture)

    @property
    def packs_rows(self) -> bool:
        return self._plain_halves and None not in self.after()

    def after(self) -> tuple[Tensor | None, Tensor | None]:
        norms = (self.norm_attn_out, self.norm_mlp_out)
        attn, mlp = (effective_weight(n.weight, n.plus_one) if isinstance(n, RMSNorm) else None for n in norms)
        return attn, mlp

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        mixed = self.attn(step.norm("norm_attn", self.norm_attn, x), step)
        x = x + step.norm("norm_attn_out", self.norm_attn_out, mixed)
        inner = self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
        return x + step.norm("norm_mlp_out", self.norm_mlp_out, inner)


class AroundBlock(SandwichBlock):
    """Norm before each half, and over its sum with the stream: Huginn."""

    @property
    def packs_rows(self) -> bool:
        return False

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        mixed = self.attn(step.norm("norm_attn", self.norm_attn, x), step)
        x = step.norm("norm_attn_out", self.norm_attn_out, mixed + x)
        inner = self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
        return step.norm("norm_mlp_out", self.norm_mlp_out, inner + x)


class PostNormBlock(Block):
    """Norm after each half, in front of the sum: OLMo 2."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.norm_attn_out = build_norm(architecture)
        self.norm_mlp_out = build_norm(architecture)

    def attention_input(self, x: Tensor, step: StepContext) -> Tensor:
        return x

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = x + step.norm("norm_attn_out", self.norm_attn_out, self.attn(x, step))
        return x + step.norm("norm_mlp_out", self.norm_mlp_out, self.mlp(x, step))


class ParallelBlock(Block):
    """Both halves read the same input: GPT-NeoX and Pythia."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        # The order of the sum is Hugging Face's, so that float32 results agree to the last bit.
        out: Tensor = (
            self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
            + self.attn(step.norm("norm_attn", self.norm_attn, x), step)
            + x
        )
        return out


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
        q = self._heads(step.project("cross_q", self.q, x_BTM))
        if step.pages is not None:
            mixed = step.pages.attend_source(q, self.scale)
            return step.project("cross_o", self.o, mixed.transpose(1, 2).flatten(2))
        assert step.memory is not None
        k, v = step.memory.entries(lambda states_BSE: self._entries(states_BSE, step))
        mixed = attention(q, k, v, scale=self.scale, mask=step.memory.mask, causal=False)
        return step.project("cross_o", self.o, mixed.transpose(1, 2).flatten(2))

    def entries(self, states_BSE: Tensor, delta: Addition | None) -> Entries:
        """Keys and values (B, G, S, D) of an encoder's output, with what a step adds to this layer."""
        none = torch.empty(0)
        return self._entries(states_BSE, StepContext(none, none, None, False, None, None, delta))

    def _entries(self, states_BSE: Tensor, step: StepContext) -> Entries:
        k = self._heads(step.project("cross_k", self.k, states_BSE))
        return k, self._heads(step.project("cross_v", self.v, states_BSE))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)


class CrossBlock(Block):
    """Attention over an encoder's output between the two halves: T5, mT5 and LongT5 decoders (thesis 2)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.cross = CrossAttention(architecture)
        self.norm_cross = build_norm(architecture)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attn.behind(self.norm_attn, x, step)
        x = x + self.cross(step.norm("norm_cross", self.norm_cross, x), step)
        return self.mlp.behind(self.norm_mlp, x, step)


BLOCKS: dict[str, type[Block]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
    "sandwich": SandwichBlock,
    "around": AroundBlock,
    "parallel": ParallelBlock,
}


def build_block(architecture: Architecture) -> Block:
    return CrossBlock(architecture) if architecture.cross else BLOCKS[architecture.residual](architecture)


__all__ = ["BLOCKS", "Block", "CrossBlock", "Packed", "StepContext", "build_block"]
