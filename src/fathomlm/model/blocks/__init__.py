"""Own blocks, few and small: ways to wire attention and feed-forward around the residual stream, and an encoder's output
into it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathomlm.depth import Architecture
from fathomlm.kernels.half import effective_weight, folded
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.blocks.attention import Attention, CrossAttention, build_norm
from fathomlm.model.blocks.feed_forward import Experts, FeedForward, aligned
from fathomlm.model.blocks.step_context import CrossRows, Packed, PackedRows, StepContext


class Block(nn.Module):
    """One layer. Subclasses wire the same parts differently around the residual stream."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.attn = Attention(architecture)
        self.mlp: FeedForward | Experts = Experts(architecture) if architecture.experts else FeedForward(architecture)
        self.rows: PackedRows | None = None
        """What the layer's linears are views of, where they are of one byte a weight."""
        if architecture.residual != "post":
            self.norm_attn = build_norm(architecture)
            self.norm_mlp = build_norm(architecture)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """The residual stream after this layer."""
        raise AssertionError("a block must define forward")

    def keep_entries(self, x: Tensor, step: StepContext) -> None:
        """Store this layer's keys and values of a residual stream, and run nothing else of it."""
        if step.pages is not None and not step.pages.reads:
            step.pages.store(self.attn.entries(self.attention_input(x, step), step))
        elif step.kv is not None:
            step.kv.append(*self.attn.entries(self.attention_input(x, step), step))

    def attention_input(self, x: Tensor, step: StepContext) -> Tensor:
        """What keys and values are made of."""
        return step.norm("norm_attn", self.norm_attn, x)

    @property
    def packs(self) -> bool:
        """Whether both halves have training forms that take packed weights."""
        return False

    @property
    def packs_rows(self) -> bool:
        """Whether the kernels for decoding rows run it. Those also know a norm behind each half (`after`), other gates than
        silu, and attention over an encoder's output."""
        return False

    @property
    def _plain_halves(self) -> bool:
        """Norms and linears as they are made here: those that another package has wrapped (PEFT) add to what their weights
        say."""
        normed = all(isinstance(norm, RMSNorm) for norm in (self.norm_attn, self.norm_mlp))
        linears = (self.attn.q, self.attn.k, self.attn.v, self.attn.o, *self.mlp.children())
        own = all(isinstance(linear, nn.Linear) for linear in linears if not isinstance(linear, RMSNorm))
        return normed and own and not self.attn.o_bias

    @property
    def _row_halves(self) -> bool:
        return self._plain_halves and self.attn.packs_rows and self.mlp.gates

    def after(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the norms behind each half, where there are any."""
        return None, None

    def cross_rows(self, dtype: torch.dtype) -> CrossRows | None:
        """What reads an encoder's output, where the layer does."""
        return None

    def pack_rows(self, dtype: torch.dtype) -> PackedRows:
        """The weights for the kernels of decoding rows."""
        qkv, o, both, down = self.pack(dtype)
        return PackedRows(qkv, o, *aligned(both, down), *self.after(), self.mlp.activation, self.cross_rows(dtype))

    def pack(self, dtype: torch.dtype) -> Packed:
        """The weights for `StepContext.packed`."""
        assert isinstance(self.norm_attn, RMSNorm)
        assert isinstance(self.norm_mlp, RMSNorm)
        assert isinstance(self.mlp, FeedForward)
        qkv = self.attn.pack(self.norm_attn, dtype)
        return Packed(qkv, self.attn.o.weight.to(dtype), *self.mlp.pack(self.norm_mlp, dtype))


class PreNormBlock(Block):
    """Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

    @property
    def packs(self) -> bool:
        return self._plain_halves and self.attn.plain and self.mlp.plain

    @property
    def packs_rows(self) -> bool:
        return self._row_halves

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
        return self._row_halves and None not in self.after()

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


class CrossBlock(Block):
    """Attention over an encoder's output between the two halves: T5, mT5 and LongT5 decoders (thesis 2)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.cross = CrossAttention(architecture)
        self.norm_cross = build_norm(architecture)

    @property
    def packs_rows(self) -> bool:
        own = all(isinstance(linear, nn.Linear) for linear in self.cross.children())
        return self._row_halves and own and isinstance(self.norm_cross, RMSNorm)

    def cross_rows(self, dtype: torch.dtype) -> CrossRows:
        assert isinstance(self.norm_cross, RMSNorm)
        norm = self.norm_cross
        return CrossRows(
            folded((self.cross.q.weight,), norm.weight, norm.plus_one, dtype), self.cross.o.weight.to(dtype).contiguous()
        )

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
