"""How the kernels for decoding rows are cut into programs: the one place to change their launch settings.

A product of few rows with a weight is bound by reading the weight. Its programs must together keep enough bytes on their
way to hide memory's latency, so there should be at least as many programs as multiprocessors, each with several deep tiles
in flight. Pure functions of shapes: nothing is tried out at run time, and a captured graph keeps what they chose.
`benchmarks/row_kernels.py --sweep` compares the choices with others.

How the sum over a row is cut (`split`, its shares) follows from the weight's shape alone, not from how many rows there are,
except that one row alone has ways of its own.
"""

from __future__ import annotations

from typing import NamedTuple

SMS = 132
"""Multiprocessors of an H100 or H200."""
STAGES, FEWER_STAGES, MORE_STAGES = 6, 4, 8
"""Tiles in flight: of 64 + 64 rows and 64 terms six take 96 KB, so two programs fit on a multiprocessor. Of four, three do,
where that lets all programs run at once instead of a few after the others. Half as wide, eight still leave room for two."""
MAX_SPLIT, LEAST_SHARE = 8, 512
"""The most programs that share one tile's sum, and the least of its terms that each should get."""
SHARE_STEP = 64
"""Shares begin at multiples of this: 128 bytes of a 16-bit weight, a whole line of the cache."""
LEAST_NARROW = 32
"""Rows of a one-byte weight in a tile at least: eight for each of four warps."""


ONE_ROW = 2
"""Rows of the weight that a program takes where one row alone is multiplied: many small programs hide latency best, also
where an entry is one byte (four rows of int8: 9 to 20 % slower)."""
WARP_HOLDS, WHOLE_ROWS = 5120, 24_576
"""Entries of a 16-bit weight that one warp can have on their way at once, and four."""
LARGE = 80_000_000
"""Bytes of a weight from which one row's programs last long enough to be made larger: fewer of them are started."""


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


def row_block(rows: int, size: int = 2, *, narrow: bool = False) -> int:
    """Rows of a tile, entries of `size` bytes. 64 is what a Hopper tensor core multiplies at once without taking them into
    registers, and as quick for few rows as for many; more rows take several tiles. A `narrow` weight, of one byte an entry,
    is in registers anyway, where it is widened: fewer rows then keep to the instructions that multiply from there. So does
    float32, whose products are three of a tensor core's. One row is summed directly."""
    if rows == 1:
        return 1
    if size < 4 and not narrow:
        return 64
    return 16 if rows <= 16 else 32


def product_blocks(rows: int, width: int, depth: int, size: int, *, weights: int = 1, splits: bool = False) -> Blocks:
    """For rows (rows, depth) times a weight of `width` columns, `weights` rows of it a column, entries of `size` bytes.

    The widest tile that still gives every other multiprocessor a program. With `splits`, where that leaves multiprocessors
    idle, several programs share a tile's sum, and tiles may be wider still.
    """
    if rows == 1:
        return _one_row(weights, weights * width * depth * size, depth, size)
    share = 4 if splits else 2
    tile = next((t for t in (64, 32) if share * _programs(width, t // weights) >= SMS), LEAST_NARROW if size == 1 else 16)
    split = _split(_programs(width, tile // weights), depth) if splits else 1
    if size >= 4:  # what a tile holds then sits in registers, in three parts
        return Blocks(max(16, tile // 2) // weights, 32, stages=FEWER_STAGES, split=split)
    programs = split * _programs(width, tile // weights)
    stages = FEWER_STAGES if 2 * SMS < programs <= 3 * SMS else MORE_STAGES if tile == 32 and not splits else STAGES
    return Blocks(tile // weights, 128 if size == 1 and depth % 128 == 0 else 64, stages=stages, split=split)


def _one_row(weights: int, bytes_: int, depth: int, size: int) -> Blocks:
    """A few rows of the weight a program: whole, so that all of it is on its way at once, if registers hold it."""
    rows = ONE_ROW if bytes_ < LARGE or depth % 2048 == 0 else 8
    if rows * depth * max(size, 2) > 2 * WHOLE_ROWS:
        return Blocks(rows // weights, 512, stages=2)
    below = 1 << (depth.bit_length() - 1)
    block = max(below if 2 * depth <= 3 * below else 2 * below, 16)
    return Blocks(rows // weights, block, warps=1 if rows * depth * max(size, 2) <= 2 * WARP_HOLDS else 4, stages=2)


def share_of(depth: int, split: int) -> int:
    """Terms of each share of a sum; the last may be shorter."""
    share = -(-depth // split)
    return depth if split == 1 else -(-share // SHARE_STEP) * SHARE_STEP


def _programs(width: int, columns: int) -> int:
    return -(-width // columns)


def _split(programs: int, depth: int) -> int:
    split = 1
    while programs * split < 0.95 * SMS and split < MAX_SPLIT and depth >= 2 * split * LEAST_SHARE:
        split *= 2
    return split
