"""What the scheduler tells the device before a decode step.

The device carries out a `SchedulerOutput` between two decode steps, field by field in the order in which they stand there. A
page that a stopped slot held may be another sequence's further down the same output. Within a field the order does not
matter: no slot is stopped, placed or given a chunk twice, and no page is both copied from and copied to.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from fathomlm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a page of one pool, because its first entries are wanted and its owner goes on writing it."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence takes a slot. Whatever the slot held before is void, its page table and capacities too."""

    slot: int
    epoch: int
    sequence: Sequence
    entries: tuple[int, ...]
    """By table: entries that are there already, from a cached prefix. The first says how many tokens they stand for."""
    ready: bool
    """Nothing is left to prefill: its last known token runs at once, and no chunk will come."""


class PageGrant(NamedTuple):
    """Pages of one table, one after another: those of entries first * page_size and up."""

    slot: int
    table: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known tokens of a sequence to prefill now, at most one chunk for each slot."""

    slot: int
    epoch: int
    first: int
    count: int
    last: bool
    """The known tokens are prefilled but for the last one, which runs from here on."""


@dataclass(slots=True)
class SchedulerOutput:
    """Everything that changes before the next decode step. The scheduler fills it in; the device only reads it."""

    stops: list[int] = field(default_factory=list)
    """Slots to silence: their sequences were preempted or cancelled, have failed or are finished."""
    copies: list[PageCopy] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    capacity: dict[tuple[int, int], int] = field(default_factory=dict)
    """By slot and table: how many entries the table has pages for now. A row that would need more waits on the device."""
    chunks: list[PrefillChunk] = field(default_factory=list)

    def check(
        self, *, tables: abc.Sequence[int], pool_pages: abc.Sequence[int], max_sequences: int, pages: int, size: int
    ) -> None:
        """Assert that the device is told of nothing outside its memory: it carries this out without looking. `pages` is how
        many a table may have, `size` how many entries a page holds."""
        for grant in self.grants:
            slot, table, first, given = grant
            assert 0 <= slot < max_sequences, f"{grant} is for one of {max_sequences} slots"
            assert 0 <= first <= first + len(given) <= pages, f"{grant} goes into a table of {pages} pages"
            assert 0 <= min(given) <= max(given) < pool_pages[tables[table]], f"{grant} is of a pool of {pool_pages} pages"
        for (slot, table), entries in self.capacity.items():
            assert 0 <= slot < max_sequences, f"slot {slot} is one of {max_sequences}"
            assert 0 <= entries <= pages * size, f"{entries} entries of table {table} in {pages} pages of {size} entries"
        for placement in self.placements:
            held, source = placement.sequence.source_pages, len(placement.sequence.source)
            assert len(held) == -(-source // size), f"a source of {source} tokens has {len(held)} pages"
            assert all(0 <= page < pool_pages[0] for page in held), f"a source has pages {held} of {pool_pages[0]}"
