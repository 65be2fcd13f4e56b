"""The pages of sequences: what they need, what they get, what they leave behind for others.

Pages come from free ones first, then from prefixes that only the cache holds. Taking them from other sequences is the
scheduler's decision, never made here.
"""

from __future__ import annotations

from collections import abc

from fathomlm.engine.page_pool import PagePool
from fathomlm.engine.prefix_cache import CachedPrefix, PrefixCache
from fathomlm.engine.schedule import PageCopy, PageGrant, SchedulerOutput
from fathomlm.engine.sequence import Sequence

MOST_AHEAD = 64
"""Pages of a table to hand out beyond those needed, while there are plenty: each time takes as long as several tokens."""


class PageManager:
    """The pools, and the prefix cache over them. `tables[t]` is the pool that table t of every sequence draws from."""

    def __init__(
        self, *, tables: abc.Sequence[int], pool_pages: abc.Sequence[int], page_size: int, prefix_caching: bool
    ) -> None:
        assert tables, "a sequence has at least one table"
        assert set(tables) == set(range(len(pool_pages))), f"tables {tables} draw from {len(pool_pages)} pools"
        assert page_size >= 1, f"pages of {page_size} entries"
        self.tables = tuple(tables)
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.pools = tuple(PagePool(pages) for pages in pool_pages)
        self._pool_of = [self.pools[pool] for pool in self.tables]
        """By table."""
        self._tables_of = [self.tables.count(number) for number in range(len(self.pools))]
        """By pool, how many tables draw from it."""
        self.prefixes = PrefixCache(tables=self.tables, pools=self.pools, page_size=page_size)

    def worst_case(self, sequence: Sequence) -> list[int]:
        """By pool: the pages of a sequence whose every table holds as many entries as it ever must."""
        pages = self._pages_for(sequence.most_entries - sequence.spare)
        return self._with_source(sequence, [tables * pages for tables in self._tables_of])

    def short(self, sequence: Sequence, more: int) -> bool:
        """Whether any table lacks room for `more` tokens. Every `schedule` asks it of every sequence, so it is quick.

        Tokens that were issued and not confirmed count in every table, here and below: which of them went deep is not
        known yet."""
        most, ahead = sequence.most_entries, sequence.prefilled - sequence.confirmed + more
        for entries, pages in zip(sequence.entries, sequence.pages, strict=True):
            if len(pages) * self.page_size < min(most, entries + ahead):
                return True
        return False

    def ahead(self, sequences: int) -> int:
        """Pages of a table that one of so many sequences may have beyond its need: the fewer the less is free now, so that
        hardly any are left idle when pages run short. Prefixes stay cached."""
        most = MOST_AHEAD
        for pool, tables in zip(self.pools, self._tables_of, strict=True):
            most = min(most, pool.free // (2 * sequences * tables))
        return most

    def available(self, pages: int) -> bool:
        """Whether there are so many pages of each table that no sequence holds; cached prefixes may have to go for them."""
        return all(pool.available >= pages * tables for pool, tables in zip(self.pools, self._tables_of, strict=True))

    def fits(self, sequence: Sequence, more: int) -> bool:
        """Whether a sequence can have room for `more` tokens without taking a page from another."""
        return self._can_have(self._missing(sequence, more))

    def grow(self, sequence: Sequence, more: int, out: SchedulerOutput) -> bool:
        """Give a sequence room for `more` tokens in every table, or for as many as there are pages left. Returns whether
        there were enough."""
        enough = True
        most, ahead, size = sequence.most_entries, sequence.prefilled - sequence.confirmed + more, self.page_size
        for table, (entries, pages, pool) in enumerate(zip(sequence.entries, sequence.pages, self._pool_of, strict=True)):
            lacking = min(most, entries + ahead) - len(pages) * size
            if lacking > 0:
                count = -(-lacking // size)
                if count > pool.free:
                    wanted, count = count, min(count, pool.available)
                    enough = enough and count == wanted
                if count > 0:
                    self._give(sequence, table, count, out)
        return enough

    def find(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached prefix of a sequence, held for it; empty when prefixes are not cached."""
        return self.prefixes.find(sequence.keys, sequence.id) if self.prefix_caching else self.prefixes.nothing()

    def adopt(self, sequence: Sequence, prefix: CachedPrefix, more: int, headroom: int) -> bool:
        """Start a sequence from a cached prefix, if there are pages to prefill up to `more` tokens and to run one, and
        `headroom` pages a pool besides. Else it has nothing and holds nothing.

        Full pages are shared. A partly filled one counts as missing: it will be copied (`settle`).
        """
        sequence.goal = sequence.length - 1
        sequence.prefilled = sequence.confirmed = prefix.length
        sequence.entries = list(prefix.entries)
        sequence.pages = [list(pages[: self._full(prefix, table)]) for table, pages in enumerate(prefix.pages)]
        if prefix.length:
            for pool, pages in zip(self._pool_of, sequence.pages, strict=True):
                pool.share(pages)
        missing = self._with_source(sequence, self._missing(sequence, min(more, sequence.unissued) + 1))
        if self._can_have([pages + headroom for pages in missing]):
            return True
        self.give_back(sequence)
        return False

    def settle(self, sequence: Sequence, prefix: CachedPrefix, out: SchedulerOutput) -> None:
        """Tell the device the pages that a placed sequence has adopted, with a copy of each that is partly filled. A source
        has all its pages from now on, until they are given back.

        What is copied from stays as it is at least until the next `schedule`, because the sequence holds its record.
        """
        if sequence.source:
            sequence.source_pages = self._taken(0, self._pages_for(len(sequence.source)))
        slot = sequence.slot
        assert slot is not None, f"sequence {sequence.id} adopts pages, but it is not placed"
        for table, pages in enumerate(prefix.pages):
            if adopted := sequence.pages[table]:
                out.grants.append(PageGrant(slot, table, 0, tuple(adopted)))
            out.capacity[slot, table] = len(adopted) * self.page_size
            for source in pages[self._full(prefix, table) :]:
                self._give(sequence, table, 1, out)
                out.copies.append(PageCopy(self.tables[table], source, sequence.pages[table][-1]))

    def let_go(self, sequence: Sequence) -> None:
        """Make room: the sequence goes on with its own pages, and the records that it holds may be evicted."""
        self.prefixes.let_go(sequence.id)

    def remember_chunk(self, sequence: Sequence) -> None:
        """Cache what was prefilled of a sequence. Its confirmed entries are those of just these tokens."""
        if self.prefix_caching:
            entries = [sequence.shared_entries(each) for each in sequence.entries]
            self.prefixes.record(sequence.keys, entries, sequence.pages, sequence.id)

    def remember_run(self, sequence: Sequence) -> None:
        """Cache what a sequence has run, before it gives its pages back.

        Only one table can be known at any position: a running token may be on its way through deeper ones. And a
        position is done in every layer only when the token behind it is known; where tokens exit early, when one behind it
        has run every layer.
        """
        if self.prefix_caching and len(self.tables) == 1:
            done = min(sequence.entries[0], sequence.length - 1)
            done = done if sequence.exact is None else min(done, max(sequence.goal, sequence.exact))
            self.prefixes.record(sequence.keys, (sequence.shared_entries(done),), sequence.pages)

    def give_back(self, sequence: Sequence) -> None:
        for pool, pages in zip(self._pool_of, sequence.pages, strict=True):
            pool.release(reversed(pages))
        self.pools[0].release(reversed(sequence.source_pages))
        self.prefixes.let_go(sequence.id)
        sequence.pages, sequence.entries, sequence.source_pages = [], [], []
        sequence.goal = sequence.prefilled = sequence.confirmed = 0

    def _missing(self, sequence: Sequence, more: int) -> list[int]:
        missing = [0] * len(self.pools)
        most, ahead, size = sequence.most_entries, sequence.prefilled - sequence.confirmed + more, self.page_size
        for pool, entries, pages in zip(self.tables, sequence.entries, sequence.pages, strict=True):
            lacking = min(most, entries + ahead) - len(pages) * size
            if lacking > 0:
                missing[pool] -= -lacking // size
        return missing

    def _can_have(self, pages: list[int]) -> bool:
        return all(wanted <= pool.available for wanted, pool in zip(pages, self.pools, strict=True))

    def _give(self, sequence: Sequence, table: int, count: int, out: SchedulerOutput) -> None:
        slot, pages, given = sequence.slot, sequence.pages[table], self._taken(self.tables[table], count)
        assert slot is not None, f"sequence {sequence.id} gets a page, but it is not placed"
        out.grants.append(PageGrant(slot, table, len(pages), tuple(given)))
        pages += given
        out.capacity[slot, table] = len(pages) * self.page_size

    def _taken(self, pool: int, count: int) -> list[int]:
        if self.pools[pool].free < count:
            self.prefixes.evict(pool, count)
        return self.pools[pool].allocate(count)

    def _with_source(self, sequence: Sequence, pages: list[int]) -> list[int]:
        """Pages by pool, with those of the source."""
        return [pages[0] + self._pages_for(len(sequence.source)), *pages[1:]]

    def _full(self, prefix: CachedPrefix, table: int) -> int:
        return prefix.entries[table] // self.page_size

    def _pages_for(self, entries: int) -> int:
        return -(-entries // self.page_size)
