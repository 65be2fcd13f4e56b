"""Own blocks, few and small: ways to wire attention and feed-forward around the residual stream, and an encoder's output
into it."""

from __future__ import annotations

from fathomlm.depth import Architecture
from fathomlm.model.blocks.cross import CrossBlock
from fathomlm.model.blocks.parallel import ParallelBlock
from fathomlm.model.blocks.parts import Block, Packed, StepContext
from fathomlm.model.blocks.prenorm import PreNormBlock
from fathomlm.model.blocks.sandwich import SandwichBlock

BLOCKS: dict[str, type[Block]] = {"pre": PreNormBlock, "sandwich": SandwichBlock, "parallel": ParallelBlock}


def build_block(architecture: Architecture) -> Block:
    return CrossBlock(architecture) if architecture.cross else BLOCKS[architecture.residual](architecture)


__all__ = ["BLOCKS", "Block", "Packed", "StepContext", "build_block"]
