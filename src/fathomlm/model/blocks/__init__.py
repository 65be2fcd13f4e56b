"""Own blocks, few and small: three ways to wire attention and feed-forward around the residual stream."""

from __future__ import annotations

from fathomlm.depth import Architecture
from fathomlm.model.blocks.parallel import ParallelBlock
from fathomlm.model.blocks.parts import Block, StepContext
from fathomlm.model.blocks.prenorm import PreNormBlock
from fathomlm.model.blocks.sandwich import SandwichBlock

BLOCKS: dict[str, type[Block]] = {"pre": PreNormBlock, "sandwich": SandwichBlock, "parallel": ParallelBlock}


def build_block(architecture: Architecture) -> Block:
    return BLOCKS[architecture.residual](architecture)


__all__ = ["BLOCKS", "Block", "StepContext", "build_block"]
