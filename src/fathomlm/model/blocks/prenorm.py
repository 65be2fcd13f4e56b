"""Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

from __future__ import annotations

from torch import Tensor

from fathomlm.model.blocks.parts import Block, StepContext


class PreNormBlock(Block):
    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x = x + self.attn(step.norm("norm_attn", self.norm_attn, x), step)
        out: Tensor = x + self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
        return out
