"""A device of a few dozen lines: it carries out plans as the real one does, and complains where that could go wrong.

Its language model is a checksum: the next token, and how deep a token goes, follow from the text so far. So texts that
begin alike have the same entries, and what is generated can be compared with `reference`. An entry of a page is marked
with the text that it stands for; a row checks the marks of everything it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from fathomlm.engine.prefix_cache import CachedPrefix, PrefixCache
from fathomlm.engine.schedule import PrefillChunk, SchedulerOutput

END = 0
"""The token that ends a text; the others are 1, 2 and 3."""

Mark = tuple[int, bytes]


def next_token(known: Sequence[int]) -> int:
    value = crc32(b"next" + bytes(known)) % 16
    return END if value == 0 else 1 + value % 3


def depth(known: Sequence[int], tables: int) -> int:
    """How many tables get an entry of the last token."""
    return 1 + crc32(b"depth" + bytes(known)) % tables


def reference(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The text that a prompt leads to, without pages, batches or schedules."""
    known = list(prompt)
    while len(known) < len(prompt) + max_new_tokens and (len(known) == len(prompt) or known[-1] != END):
        known.append(next_token(known))
    return known[len(prompt) :]


def marks(known: Sequence[int], tables: int) -> list[list[Mark]]:
    """By table: the entries of all these tokens."""
    found: list[list[Mark]] = [[] for _ in range(tables)]
    for end in range(1, len(known) + 1):
        for table in range(depth(known[:end], tables)):
            found[table].append((table, bytes(known[:end])))
    return found


@dataclass
class Report:
    """What the host hears of one sequence after a tick."""

    id: int
    epoch: int
    entries: list[int]
    upto: int | None = None
    """For a chunk: how many tokens are read."""
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass
class Row:
    id: int
    epoch: int
    known: list[int]
    longest: int
    entries: list[int]
    ran: int
    """Tokens that all tables have, as deep as they go."""
    running: bool
    pages: list[list[int]]
    rooms: list[int]
    chunk: PrefillChunk | None = None
    stage: int = 0
    """Tables that the token which runs now has been through."""
    fresh: list[int] = field(default_factory=list)
    ended: bool = False


class Device:
    def __init__(self, *, tables: Sequence[int], page_size: int, prefill_chunk: int) -> None:
        self.tables = tuple(tables)
        self.page_size = page_size
        self.prefill_chunk = prefill_chunk
        self.rows: dict[int, Row] = {}
        self.memory: dict[tuple[int, int], dict[int, Mark]] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        self._no_overlaps(plan)
        for slot in plan.stops:
            del self.rows[slot]
        for copy in plan.copies:
            self.memory[copy.pool, copy.target] = dict(self.memory[copy.pool, copy.source])
        for placement in plan.placements:
            assert placement.slot not in self.rows, "a slot was placed without a stop"
            sequence, none = placement.sequence, [0] * len(self.tables)
            self.rows[placement.slot] = Row(
                id=sequence.id,
                epoch=placement.epoch,
                known=list(sequence.known),
                longest=len(sequence.prompt) + sequence.max_new_tokens,
                entries=list(placement.entries),
                ran=placement.entries[0],
                running=placement.ready,
                pages=[[] for _ in none],
                rooms=none,
            )
            assert placement.ready == (placement.entries[0] == sequence.length - 1)
        for grant in plan.grants:
            pages = self.rows[grant.slot].pages[grant.table]
            assert grant.first == len(pages)
            assert grant.pages
            pages += grant.pages
        for (slot, table), entries in plan.capacity.items():
            self.rows[slot].rooms[table] = entries
        for row in self.rows.values():
            assert row.rooms == [len(pages) * self.page_size for pages in row.pages], "rooms and pages differ"
            assert all(room - self.page_size < row.longest - 1 for room in row.rooms), "a page that can never be used"
        for chunk in plan.chunks:
            row = self.rows[chunk.slot]
            assert row.epoch == chunk.epoch
            assert chunk.last == (chunk.first + chunk.count == len(row.known) - 1)
            row.chunk = chunk

    def tick(self, passes: dict[int, int]) -> list[Report]:
        """Read every chunk, then let each row that runs go through some tables, by slot."""
        reports = []
        for slot, row in sorted(self.rows.items()):
            if row.chunk is not None:
                reports.append(self._read(row, row.chunk))
            before = list(row.entries)
            for _ in range(passes.get(slot, 0)):
                self._run(row)
            if row.fresh or row.entries != before:
                reports.append(Report(row.id, row.epoch, list(row.entries), None, row.fresh, row.ended))
                row.fresh = []
        return reports

    def check(self) -> None:
        """Every row sees the entries of its own text, and no other."""
        for row in self.rows.values():
            wanted = marks(row.known[: row.ran + (row.stage > 0)], len(self.tables))
            for table, pages in enumerate(row.pages):
                count = row.entries[table]
                assert self.seen(table, pages, count) == wanted[table][:count]
                assert count == len(wanted[table]) - (0 < row.stage <= table < self._depth(row))

    def seen(self, table: int, pages: Sequence[int], count: int) -> list[Mark]:
        pool, size = self.tables[table], self.page_size
        return [self.memory[pool, pages[entry // size]][entry % size] for entry in range(count)]

    def _no_overlaps(self, plan: SchedulerOutput) -> None:
        assert sum(chunk.count for chunk in plan.chunks) <= self.prefill_chunk, "more is read than the plan may"
        assert all(chunk.count > 0 for chunk in plan.chunks)
        sources = {(copy.pool, copy.source) for copy in plan.copies}
        targets = [(copy.pool, copy.target) for copy in plan.copies]
        assert not sources.intersection(targets), "a page is copied from and copied to"
        assert len(set(targets)) == len(targets)
        for slots in (plan.stops, [p.slot for p in plan.placements], [c.slot for c in plan.chunks]):
            assert len(set(slots)) == len(slots)

    def _read(self, row: Row, chunk: PrefillChunk) -> Report:
        assert chunk.first == row.ran, "a chunk does not begin where the last one ended"
        for _ in range(chunk.count):
            for table in range(self._depth(row)):
                self._write(row, table)
            row.ran += 1
        row.chunk = None
        row.running = chunk.last
        return Report(row.id, row.epoch, list(row.entries), upto=row.ran)

    def _run(self, row: Row) -> None:
        """One pass: through one table, or, behind the last, to the next token. A row without room waits."""
        if row.ended or not row.running:
            return
        full = any(entries >= room for entries, room in zip(row.entries, row.rooms, strict=True))
        if row.stage == 0 and full:
            return
        self._write(row, row.stage)
        row.stage += 1
        if row.stage == self._depth(row):
            row.stage = 0
            row.ran += 1
            token = next_token(row.known)
            row.known.append(token)
            row.fresh.append(token)
            row.ended = token == END or len(row.known) == row.longest

    def _depth(self, row: Row) -> int:
        """How deep the token goes that is read or run next."""
        return depth(row.known[: row.ran + 1], len(self.tables))

    def _write(self, row: Row, table: int) -> None:
        entry = row.entries[table]
        assert entry < row.rooms[table], "an entry without room"
        pool, page = self.tables[table], row.pages[table][entry // self.page_size]
        for other in self.rows.values():
            for theirs, pages in enumerate(other.pages):
                mine = other is row and theirs == table
                assert mine or self.tables[theirs] != pool or page not in pages, "a page is written that another reads"
        self.memory.setdefault((pool, page), {})[entry % self.page_size] = (table, bytes(row.known[: row.ran + 1]))
        row.entries[table] += 1


def records(cache: PrefixCache) -> Iterator[tuple[tuple[int, ...], CachedPrefix, tuple[tuple[int, ...], ...], bool]]:
    """Every record: its text, what it says of it, by table the pages that it keeps itself, and whether anybody holds it."""
    empty = cache.nothing()
    waiting = [(cache._root, (), empty)]
    while waiting:
        node, text, prefix = waiting.pop()
        if node.record is not None:
            joined = zip(prefix.pages, node.record.starts, node.record.pages, strict=True)
            pages = tuple((*pages[:start], *own) for pages, start, own in joined)
            prefix = CachedPrefix(len(text), node.record.entries, pages)
            yield text, prefix, node.record.pages, node.holders > 0
        assert node.children or node.record or node is cache._root, "a node leads nowhere"
        waiting += [(child, text + child.key, prefix) for child in node.children.values()]
