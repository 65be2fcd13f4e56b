"""What the scheduler tells the device before a decode step.

The device carries out a `SchedulerOutput` between two decode steps, field by field in the order in which they stand there. A
page that a stopped slot held may be another sequence's further down the same output. Within a field the order does not
matter: no slot is stopped, placed or given a chunk twice, and no page is both copied from and copied to.
"""

from __future__ import annotations

import operator
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
        limits, room = [pool_pages[pool] for pool in tables], pages * size
        if self.grants:  # all at once; which of them it is is looked for only where one is wrong
            slots, of, firsts, given = zip(*self.grants, strict=True)
            right = 0 <= min(slots) <= max(slots) < max_sequences and min(firsts) >= 0
            right = right and max(map(operator.add, firsts, map(len, given))) <= pages and min(map(min, given)) >= 0
            right = right and all(map(operator.lt, map(max, given), map(limits.__getitem__, of)))
            assert right, self._wrong_grant(limits, max_sequences, pages)
        if self.capacity:
            least, most = min(self.capacity), max(self.capacity)
            assert 0 <= least[0] <= most[0] < max_sequences, f"slot {most[0]} is one of {max_sequences}"
            most_entries = max(self.capacity.values())
            assert most_entries <= room, f"{most_entries} entries of a table in {pages} pages of {size} entries"
            assert min(self.capacity.values()) >= 0, "a table has room for fewer entries than none"
        for placement in self.placements:
            held, source = placement.sequence.source_pages, len(placement.sequence.source)
            assert len(held) == -(-source // size), f"a source of {source} tokens has {len(held)} pages"
            assert all(0 <= page < pool_pages[0] for page in held), f"a source has pages {held} of {pool_pages[0]}"

    def _wrong_grant(self, limits: abc.Sequence[int], max_sequences: int, pages: int) -> str:
        for grant in self.grants:
            slot, table, first, given = grant
            if not 0 <= slot < max_sequences:
                return f"{grant} is for one of {max_sequences} slots"
            if not 0 <= first <= first + len(given) <= pages:
                return f"{grant} goes into a table of {pages} pages"
            if not 0 <= min(given) <= max(given) < limits[table]:
                return f"{grant} is of a pool of {limits[table]} pages"
        raise AssertionError("no grant is wrong")
