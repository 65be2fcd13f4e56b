"""Norm before each half: Llama, Mistral, Qwen and the first Gemma."""

from __future__ import annotations

from torch import Tensor

from fathomlm.model.blocks.parts import Block, StepContext


class PreNormBlock(Block):
    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x, normed = step.fork("norm_attn", self.norm_attn, x)
        x, normed = step.fork("norm_mlp", self.norm_mlp, x + self.attn(normed, step))
        return self.mlp.onto(x, normed, step)
