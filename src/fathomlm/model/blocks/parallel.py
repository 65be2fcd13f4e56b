"""Both halves read the same input: GPT-NeoX and Pythia."""

from __future__ import annotations

from torch import Tensor

from fathomlm.model.blocks.parts import Block, StepContext


class ParallelBlock(Block):
    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        # The order of the sum is Hugging Face's, so that float32 results agree to the last bit.
        out: Tensor = (
            self.mlp(step.norm("norm_mlp", self.norm_mlp, x), step)
            + self.attn(step.norm("norm_attn", self.norm_attn, x), step)
            + x
        )
        return out
