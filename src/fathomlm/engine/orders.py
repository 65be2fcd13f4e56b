"""What the host tells the device before a tick.

The device carries out a plan between two ticks, field by field in the order in which they stand in `Plan`. A page that a
stopped slot held may be somebody else's further down the same plan. Within a field the order does not matter: no slot
is stopped, placed or given a chunk twice, and no page is both copied from and copied to.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from fathomlm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a page of one pool, because its first entries are wanted and its owner goes on writing it."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence takes a slot. Whatever the slot held before is void, its page table and rooms too."""

    slot: int
    epoch: int
    sequence: Sequence
    entries: tuple[int, ...]
    """By table: entries that are there already, from a cached prefix. The first says how many tokens they stand for."""
    ready: bool
    """Nothing is left to read: its last known token runs at once, and no chunk will come."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The page of entries index * page_size and up of one table."""

    slot: int
    table: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class Room:
    """How many entries a table has pages for now. A row that would need more waits on the device."""

    slot: int
    table: int
    entries: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of the known text to read now, at most one chunk a slot and plan."""

    slot: int
    epoch: int
    first: int
    count: int
    last: bool
    """The known text is read but for its last token, which runs from here on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that changes before the next tick."""

    stops: list[int]
    """Slots to silence: their sequences were preempted or cancelled, have failed or are finished."""
    copies: list[Copy]
    placements: list[Placement]
    grants: list[Grant]
    rooms: list[Room]
    chunks: list[Chunk]

    def check(self, *, tables: abc.Sequence[int], pool_pages: abc.Sequence[int], slots: int, pages: int, size: int) -> None:
        """Assert that the device is told of nothing outside its memory: it carries plans out without looking. `pages` is how
        many a table may have, `size` how many entries a page holds."""
        for grant in self.grants:
            assert 0 <= grant.slot < slots, f"{grant} is for one of {slots} slots"
            assert 0 <= grant.index < pages, f"{grant} goes into a table of {pages} pages"
            assert 0 <= grant.page < pool_pages[tables[grant.table]], f"{grant} is of a pool of {pool_pages} pages"
        for room in self.rooms:
            assert 0 <= room.slot < slots, f"{room} is for one of {slots} slots"
            assert 0 <= room.entries <= pages * size, f"{room} is in a table of {pages} pages of {size} entries"


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    """Tokens that may still be read."""
    copies: list[Copy] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    rooms: dict[tuple[int, int], int] = field(default_factory=dict)
    """Entries by slot and table: a table that grows twice is told once."""
    chunks: list[Chunk] = field(default_factory=list)

    def finished(self, stops: list[int]) -> Plan:
        rooms = [Room(slot, table, entries) for (slot, table), entries in self.rooms.items()]
        return Plan(stops, self.copies, self.placements, self.grants, rooms, self.chunks)
