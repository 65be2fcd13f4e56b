"""Norm before and after each half: Gemma 3."""

from __future__ import annotations

from torch import Tensor

from fathomlm.depth import Architecture
from fathomlm.model.blocks.parts import Block, StepContext, build_norm


class SandwichBlock(Block):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.norm_attn_out = build_norm(architecture)
        self.norm_mlp_out = build_norm(architecture)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        mixed = self.attn(step.norm("norm_attn", self.norm_attn, x), step)
        x = x + step.norm("norm_attn_out", self.norm_attn_out, mixed)
        inner = self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
        return x + step.norm("norm_mlp_out", self.norm_mlp_out, inner)
