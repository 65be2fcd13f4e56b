"""How attention over pages is cut into programs: the one place to change its launch settings.

Pure functions of shapes, as in `row_blocks`. `benchmarks/attention_settings.py` compares the choices with others.
"""

from __future__ import annotations

from typing import NamedTuple

from fathomlm.kernels.row_blocks import SMS

MAX_SPLITS, LEAST_ENTRIES = 32, 128
"""The most programs that share a row's entries, and the fewest entries worth a program."""
MANY_PROGRAMS = 8
"""Programs to a multiprocessor from which smaller ones are quicker."""


class PrefixSpan(NamedTuple):
    """Entries of a table in front of a row's own, which it sees wherever its window begins."""

    first: int = 0
    """Those before it are nobody's: a prefix ends with a page, and may begin inside one."""
    end: int = 0


NO_PREFIX = PrefixSpan()


class AttentionBlocks(NamedTuple):
    entries: int
    """Entries of a row that a program takes at a time."""
    warps: int = 4
    stages: int = 3
    queries: int = 128
    """Queries that share a program where a prompt is read: heads of a group times rows."""
    ahead: bool = False
    """Whether the numbers of the next tile's pages are loaded before this one's entries are looked at."""
    beside: bool = False
    """Whether programs of one row follow each other, whose entries are neighbours; otherwise those of one group do."""


def attention_blocks(head_dim: int, size: int, programs: int = 0) -> AttentionBlocks:
    """Keys and values of a tile take about 32 KB: three tiles on their way leave room for two programs on a
    multiprocessor. Where programs are many, smaller ones are quicker, more of which run at once. In float32, which takes
    tensor cores three products, tiles are small enough for registers. `programs` are rows times groups.

    Small programs look `ahead` and stand `beside` each other: over the contexts of 256 requests of all ages (a mean of 122
    entries, at most 398) a layer of 5 groups of 64 numbers takes 19.7 us on an H200, without both 25.6. Where contexts are
    long, tiles of 128 entries are quicker by up to 6 %; where they are short, slower by 30 %."""
    if size >= 4:
        return AttentionBlocks(32, warps=8 if head_dim > 64 else 4, stages=2)
    if head_dim <= 64 and programs >= MANY_PROGRAMS * SMS:
        return AttentionBlocks(32, warps=2, stages=3, ahead=True, beside=True)
    return AttentionBlocks(max(16, min(128, 8192 >> (head_dim - 1).bit_length())))


def prefill_blocks(head_dim: int) -> AttentionBlocks:
    """Where prompts are read. Looking ahead takes 297 us in place of 329 (four prompts of 2,046 tokens, 32 groups of 64);
    wide heads would not fit so."""
    return AttentionBlocks(64, warps=8 if head_dim > 64 else 4, queries=128, ahead=head_dim <= 64)


def choose_splits(rows: int, groups: int, longest: int, sms: int = SMS) -> int:
    """Programs to a row's entries: enough that rows and groups together give every multiprocessor a program, or two where
    rows may be long, but none with fewer than `LEAST_ENTRIES` of the `longest` row: what they find must be combined, which
    short rows are not worth. Nor is it worth it to even out rows that fill the device by themselves and wait for the longest
    of them: with shares of 64 to 256 entries a layer of 256 rows took 20.8 to 24.0 us for 19.7."""
    each = 2 if longest > 8 * LEAST_ENTRIES else 1
    wanted = -(-each * sms // max(rows * groups, 1))
    return max(1, min(wanted, longest // LEAST_ENTRIES, MAX_SPLITS))


def workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Float32 numbers that `splits` programs of every row leave for the last of them."""
    return rows * heads * splits * (head_dim + 2) if splits > 1 else 0
