"""The prefix cache: sequences that begin alike share the pages of their beginning.

Prefixes are cut every `page_size` positions and kept in a tree: a node is its parent and the next `page_size` token ids,
compared as they are, so no two sequences can be mistaken for each other. A node that carries a *record* says how many
entries each table has after exactly that many tokens, and in which pages. A record keeps only the pages that its nearest
recorded ancestor does not name, so a sequence of n pages has n keepers, not n * n.

A plain model has one table, with one entry a token: every full page is worth a record. The deeper tables of a mixture
of recursions fill at their own speed. There a record needs counts that the device reported at just that position, and
its last pages may be partly filled. A page's owner goes on writing behind the counted entries and never changes them;
who reuses the prefix copies such a page instead of sharing it.

A sequence *holds* the deepest record that it reused or made. Records that are held, and those above them, own their
pages: they are not spare, and are not evicted before their sequences end or let go of them.
"""

from __future__ import annotations

import heapq
from collections import abc
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fathomlm.engine.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the cache has of a sequence: its first `length` tokens, by table their entries and the pages of these."""

    length: int
    entries: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]


class _Record(NamedTuple):
    entries: tuple[int, ...]
    starts: tuple[int, ...]
    """By table: the page index from which on this record names the pages itself."""
    pages: tuple[tuple[int, ...], ...]


class _PrefixNode:
    __slots__ = ("children", "holders", "key", "parent", "queued", "record", "used")

    def __init__(self, parent: _PrefixNode | None, key: tuple[int, ...]) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[tuple[int, ...], _PrefixNode] = {}
        self.record: _Record | None = None
        self.holders = 0  # of this node and of all below it
        self.used = 0
        self.queued = False


class PrefixCache:
    """Records of prefixes over the pools that the tables draw from; `tables[t]` is the pool of table t."""

    def __init__(self, *, tables: abc.Sequence[int], pools: abc.Sequence[PagePool], page_size: int) -> None:
        self._tables = tuple(tables)
        self._pools = pools
        self._pool_of = [pools[pool] for pool in tables]
        self._page_size = page_size
        self._nothing = CachedPrefix(0, (0,) * len(self._tables), ((),) * len(self._tables))
        self._root = _PrefixNode(None, ())
        self._clock = 0
        self._held: dict[int, _PrefixNode] = {}
        self._leaves: list[tuple[int, int, _PrefixNode]] = []  # a heap; entries may be out of date, see _oldest
        self.records = 0
        self.evictions = 0

    def nothing(self) -> CachedPrefix:
        """The empty prefix, which every sequence has."""
        return self._nothing

    def find(self, known: abc.Sequence[int], holder: int | None = None) -> CachedPrefix:
        """The longest recorded prefix that leaves at least one token to run. The holder, if given, holds it."""
        if len(known) <= self._page_size:
            return self._nothing
        length, entries = 0, (0,) * len(self._tables)
        pages: list[list[int]] = [[] for _ in self._tables]
        path: list[_PrefixNode] = []
        for at, node in enumerate(self._walk(known, len(known) - 1), start=1):
            path.append(node)
            if node.record is not None:
                length, entries = at * self._page_size, node.record.entries
                for mine, start, theirs in zip(pages, node.record.starts, node.record.pages, strict=True):
                    mine[start:] = theirs
        self._touch(path)
        if holder is not None and length:
            self._hold(path[length // self._page_size - 1], holder)
        return CachedPrefix(length, entries, tuple(map(tuple, pages)))

    def record(
        self,
        known: abc.Sequence[int],
        entries: abc.Sequence[int],
        pages: abc.Sequence[abc.Sequence[int]],
        holder: int | None = None,
    ) -> None:
        """Remember that the first entries[0] tokens of a sequence have these entries, in these pages of the holder.

        With one table that holds at every full page on the way too. With several, the counts say nothing of other
        positions, and a position inside a page of tokens is not worth a record.
        """
        size, single = self._page_size, len(self._tables) == 1
        if entries[0] % size and not single:
            return
        node, above, path = self._root, None, []
        for end in range(size, entries[0] + 1, size):
            key = tuple(known[end - size : end])
            node = node.children.get(key) or self._grow(node, key)
            path.append(node)
            above = node.record or above
        if single:
            self._keep_pages(path, pages[0])
        elif path and node.record is None:
            node.record = self._keep(tuple(entries), pages, above)
            if node.holders:
                self._own([node.record])
        self._touch(path)
        if path:
            self._queue(path[-1])
            if holder is not None:
                self._hold(path[-1], holder)

    def let_go(self, holder: int) -> None:
        """Hold nothing any more: what was held may be evicted, if nobody else holds it."""
        node, left = self._held.pop(holder, None), []
        if node is None:
            return
        while node is not None:
            node.holders -= 1
            if node.record is not None and not node.holders:
                left.append(node.record)
                if not node.children:
                    self._queue(node)
            node = node.parent
        self._disown(left)

    def evict(self, pool: int, pages: int = 1) -> None:
        """Drop records that nobody holds, the least recently used leaves first, until the pool has so many free pages."""
        assert self._pools[pool].available >= pages, "no record keeps a page that its eviction would free"
        while self._pools[pool].free < pages:
            self._remove(self._oldest())
            self.evictions += 1

    def forget(self, known: abc.Sequence[int], beyond: int) -> None:
        """Drop what is recorded of a sequence behind its first `beyond` tokens, with all that builds on it."""
        for at, node in enumerate(self._walk(known, len(known)), start=1):
            if at * self._page_size > beyond:
                self._remove(node)
                self._leaves = [leaf for leaf in self._leaves if leaf[2].record is not None]
                heapq.heapify(self._leaves)
                return

    def clear(self) -> None:
        """Drop every record."""
        for node in list(self._root.children.values()):
            self._remove(node)
        self._leaves.clear()

    def _walk(self, known: abc.Sequence[int], most: int) -> abc.Iterator[_PrefixNode]:
        node: _PrefixNode | None = self._root
        for first, end in pairwise(range(0, most + 1, self._page_size)):
            node = node.children.get(tuple(known[first:end])) if node is not None else None
            if node is None:
                return
            yield node

    def _grow(self, parent: _PrefixNode, key: tuple[int, ...]) -> _PrefixNode:
        node = parent.children[key] = _PrefixNode(parent, key)
        return node

    def _keep(self, entries: tuple[int, ...], pages: abc.Sequence[abc.Sequence[int]], above: _Record | None) -> _Record:
        size = self._page_size
        starts = tuple(count // size for count in above.entries) if above is not None else (0,) * len(entries)
        own = tuple(tuple(pages[t][starts[t] : -(-count // size)]) for t, count in enumerate(entries))
        for pool, named in zip(self._pool_of, own, strict=True):
            pool.keep(named)
        self.records += 1
        return _Record(entries, starts, own)

    def _keep_pages(self, path: list[_PrefixNode], pages: abc.Sequence[int]) -> None:
        """`_keep` with one table, for each page on the way that has no record."""
        kept, owned = [], []
        for number, (node, page) in enumerate(zip(path, pages[: len(path)], strict=True)):
            if node.record is None:
                node.record = _Record(((number + 1) * self._page_size,), (number,), ((page,),))
                kept.append(page)
                if node.holders:
                    owned.append(node.record)
        self._pool_of[0].keep(kept)
        self._own(owned)
        self.records += len(kept)

    def _touch(self, path: list[_PrefixNode]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock

    def _queue(self, node: _PrefixNode) -> None:
        """Make a node a candidate for eviction. Whether it is a free leaf, and how old, is seen when its turn comes."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.used, id(node), node))

    def _oldest(self) -> _PrefixNode:
        """The least recently used leaf that nobody holds. There is one below every spare page."""
        while True:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.record is None or node.children or node.holders:
                continue  # gone, or not to be evicted now: it is queued again when its last child or holder goes
            if node.used == used:
                return node
            self._queue(node)

    def _hold(self, node: _PrefixNode, holder: int) -> None:
        above: _PrefixNode | None = node
        owned = []
        while above is not None:
            above.holders += 1
            if above.holders == 1 and above.record is not None:
                owned.append(above.record)
            above = above.parent
        self._own(owned)
        self.let_go(holder)
        self._held[holder] = node

    def _remove(self, top: _PrefixNode) -> None:
        """Drop a node with all that builds on it, and the nodes above it that led nowhere else."""
        below = [top]
        for node in below:
            self._release(node)
            below += node.children.values()
        node, parent = top, top.parent
        while parent is not None:
            del parent.children[node.key]
            if parent.children or parent.record is not None:
                break
            node, parent = parent, parent.parent
        if parent is not None and not parent.children:
            self._queue(parent)

    def _release(self, node: _PrefixNode) -> None:
        if node.record is None:
            return
        if node.holders:
            self._disown([node.record])
        for pool, named in zip(self._pool_of, node.record.pages, strict=True):
            pool.drop(named)
        node.record = None
        self.records -= 1

    def _own(self, records: list[_Record]) -> None:
        """Their pages have one owner more."""
        for table, pool in enumerate(self._pool_of):
            pool.share([page for record in records for page in record.pages[table]])

    def _disown(self, records: list[_Record]) -> None:
        for table, pool in enumerate(self._pool_of):
            pool.release([page for record in records for page in record.pages[table]])
