"""Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

from __future__ import annotations

from torch import Tensor

from fathomlm.model.blocks.parts import Block, StepContext


class PreNormBlock(Block):
    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attn.behind(self.norm_attn, x, step)
        return self.mlp.behind(self.norm_mlp, x, step)
