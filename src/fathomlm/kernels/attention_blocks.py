"""How attention over pages is cut into programs: the one place to change its launch settings.

Pure functions of shapes, as in `row_blocks`. `benchmarks/attention_settings.py` compares the choices with others.
"""

from __future__ import annotations

from typing import NamedTuple

from fathomlm.kernels.row_blocks import SMS

MAX_SPLITS, LEAST_ENTRIES = 32, 128
"""The most programs that share a row's entries, and the fewest entries worth a program."""
TAKES_PRODUCT = False
"""Whether attention of many rows takes what the product of queries, keys and values left (`qkv_attention`), or a kernel of
its own turns and stores that first. Not measured yet: `fused` against `apart` in the sweep."""
CALLED_BYTES = 0
"""Of the entries that the next layer's attention reads, so many are called into the cache while products run, where this
one takes the product. Not measured yet: `fetches` in the sweep."""
MANY_PROGRAMS = 8
"""Programs to a multiprocessor from which smaller ones are quicker."""
EVEN_SHARE, MOST_SHARES = 0, 8
"""Rows that fill the device have contexts of all lengths, and a layer waits for the longest. With a share, a program takes
so many entries, and several programs a row with more of them, up to the second number; 0: one program a row. Not measured
yet: `share` in `benchmarks/attention_settings.py`."""
MANY_AHEAD = True
"""`AttentionBlocks.ahead` of small programs, and `beside`. Over the contexts of 256 requests of all ages (a mean of 122
entries, at most 398) a layer of 5 groups of 64 numbers takes 19.8 us on an H200 instead of 25.6 without; with equal contexts
15.8 instead of 15.1."""


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
    share: int = 0
    """The fewest entries that a program takes where several share a row, whole tiles; 0: a tile."""


def attention_blocks(head_dim: int, size: int, programs: int = 0) -> AttentionBlocks:
    """Keys and values of a tile take about 32 KB: three tiles on their way leave room for two programs on a
    multiprocessor. Where programs are many, smaller ones are quicker, more of which run at once. In float32, which takes
    tensor cores three products, tiles are small enough for registers. `programs` are rows times groups."""
    if size >= 4:
        found = AttentionBlocks(32, warps=8 if head_dim > 64 else 4, stages=2)
    elif head_dim <= 64 and programs >= MANY_PROGRAMS * SMS:
        found = AttentionBlocks(32, warps=2, stages=3 if MANY_AHEAD else 4, ahead=MANY_AHEAD, beside=MANY_AHEAD)
    else:
        found = AttentionBlocks(max(16, min(128, 8192 >> (head_dim - 1).bit_length())))
    return found._replace(share=-(-EVEN_SHARE // found.entries) * found.entries if programs >= SMS else 0)


def prefill_blocks(head_dim: int) -> AttentionBlocks:
    """Where prompts are read."""
    return AttentionBlocks(64, warps=8 if head_dim > 64 else 4, queries=128)


def called_entries(rows: int, groups: int, head_dim: int, size: int) -> int:
    """How many entries of each row are called for the next layer, numbers of `size` bytes: whole pages of the usual size."""
    return CALLED_BYTES // (2 * rows * groups * head_dim * size) // 16 * 16


def choose_splits(rows: int, groups: int, longest: int, sms: int = SMS) -> int:
    """Programs to a row's entries: enough that rows and groups together give every multiprocessor a program, or two where
    rows may be long, but none with fewer than `LEAST_ENTRIES` of the `longest` row: what they find must be combined, which
    short rows are not worth. Rows that fill the device by themselves have as many as shares of theirs (`EVEN_SHARE`)."""
    if EVEN_SHARE and rows * groups >= sms:
        return max(1, min(-(-longest // EVEN_SHARE), MOST_SHARES))
    each = 2 if longest > 8 * LEAST_ENTRIES else 1
    wanted = -(-each * sms // max(rows * groups, 1))
    return max(1, min(wanted, longest // LEAST_ENTRIES, MAX_SPLITS))


def workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Float32 numbers that `splits` programs of every row leave for the last of them."""
    return rows * heads * splits * (head_dim + 2) if splits > 1 else 0
