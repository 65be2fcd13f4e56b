"""Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

from __future__ import annotations

from torch import Tensor

from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.blocks.parts import Block, StepContext


class PreNormBlock(Block):
    @property
    def packs(self) -> bool:
        normed = all(isinstance(norm, RMSNorm) for norm in (self.norm_attn, self.norm_mlp))
        return normed and self.attn.plain and self.mlp.plain and not self.attn.o_bias

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attn.behind(self.norm_attn, x, step)
        return self.mlp.behind(self.norm_mlp, x, step)
