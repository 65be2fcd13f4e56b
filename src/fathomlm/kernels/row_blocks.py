"""How the kernels for decoding rows are cut into programs: the one place to change their launch settings.

A product of few rows with a weight is bound by reading the weight. Its programs must together keep enough bytes on their
way to hide memory's latency, so there should be at least as many programs as multiprocessors, each with several deep tiles
in flight. Pure functions of shapes: nothing is tried out at run time, and a captured graph keeps what they chose.
`benchmarks/row_kernels.py --sweep` compares the choices with others.

How the sum over a row is cut (`split`, its shares) follows from the weight's shape alone, not from how many rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

SMS = 132
"""Multiprocessors of an H100 or H200."""
SHARED = 96 * 1024
"""Bytes of shared memory for a program's tiles in flight: two programs fit on a multiprocessor."""
STAGES = 4
MAX_SPLIT, LEAST_SHARE = 8, 256
"""The most programs that share one tile's sum, and the least of its terms that each should get."""
SHARE_STEP = 64
"""Shares begin at multiples of this: 128 bytes of a 16-bit weight, a whole line of the cache."""


class Blocks(NamedTuple):
    """The tile of one program, and how it runs."""

    columns: int
    """Columns of the output. Where a column takes two rows of the weight (gate and up, a rotated pair), twice as many rows
    are read."""
    depth: int
    """Terms of the sum at a time."""
    warps: int = 4
    stages: int = STAGES
    split: int = 1
    """Programs that share the sum of one tile."""


def row_block(rows: int) -> int:
    """Rows of a tile: the fewest that hold them all, up to 64; more rows take several tiles. 16 is a tensor core's."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def product_blocks(rows: int, width: int, depth: int, size: int, *, weights: int = 1, splits: bool = False) -> Blocks:
    """For rows (rows, depth) times a weight of `width` columns, `weights` rows of it a column, entries of `size` bytes.

    The widest tile that still gives every multiprocessor a program, as deep as fits `STAGES` times into shared memory.
    With `splits`, where even the narrowest tile leaves multiprocessors idle, several programs share a tile's sum.
    """
    tall = row_block(rows)
    tile = next((t for t in (128, 64, 32) if _programs(width, t // weights) >= SMS), 16)
    split = _split(_programs(width, tile // weights), depth) if splits else 1
    if size >= 4:  # float32 is multiplied without tensor cores, and what a tile holds then sits in registers
        return Blocks(16 // weights, 32, stages=2, split=split)
    line = STAGES * (tall + tile) * size
    deep = next((d for d in (512, 256, 128, 64) if d * line <= SHARED and d < 2 * depth), 32)
    return Blocks(tile // weights, deep, warps=8 if tall == 64 else 4, split=split)


def share_of(depth: int, split: int) -> int:
    """Terms of each share of a sum; the last may be shorter."""
    share = -(-depth // split)
    return depth if split == 1 else -(-share // SHARE_STEP) * SHARE_STEP


def _programs(width: int, columns: int) -> int:
    return -(-width // columns)


def _split(programs: int, depth: int) -> int:
    split = 1
    while programs * split < SMS and split < MAX_SPLIT and depth >= 2 * split * LEAST_SHARE:
        split *= 2
    return split
