"""The prefix cache: what it finds, what it keeps, what it lets go first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device_model import marks, records
from fathomlm.engine.page_pool import PagePool
from fathomlm.engine.prefix_cache import CachedPrefix, PrefixCache

SIZE = 2


def build(tables: tuple[int, ...] = (0,), pages: int = 100) -> tuple[PrefixCache, list[PagePool]]:
    pools = [PagePool(pages) for _ in range(max(tables) + 1)]
    return PrefixCache(tables=tables, pools=pools, page_size=SIZE), pools


def take(pools: list[PagePool], tables: tuple[int, ...], entries: list[int]) -> list[list[int]]:
    """Pages of a sequence with so many entries a table."""
    return [
        [page for _ in range(-(-count // SIZE)) for page in pools[pool].allocate()]
        for pool, count in zip(tables, entries, strict=True)
    ]


def leave(pools: list[PagePool], tables: tuple[int, ...], pages: list[list[int]]) -> None:
    for table, mine in enumerate(pages):
        for page in mine:
            pools[tables[table]].release([page])


def cached(cache: PrefixCache) -> set[tuple[int, ...]]:
    return {text for text, *_ in records(cache)}


def run(cache: PrefixCache, pool: PagePool, text: tuple[int, ...]) -> list[int]:
    """A plain sequence comes, reads and goes: returns its pages, which only the cache holds now."""
    pages = take([pool], (0,), [len(text)])
    cache.record(text, (len(text),), pages)
    leave([pool], (0,), pages)
    return pages[0]


def test_one_table_is_found_at_every_full_page() -> None:
    cache, pools = build()
    pages = take(pools, (0,), [5])
    cache.record((1, 2, 3, 4, 5), (5,), pages)
    assert cached(cache) == {(1, 2), (1, 2, 3, 4)}
    assert cache.find((1, 2, 3, 4, 5, 6)) == CachedPrefix(4, (4,), ((pages[0][0], pages[0][1]),))
    assert cache.find((1, 2, 3, 3, 5)) == CachedPrefix(2, (2,), ((pages[0][0],),))
    assert cache.find((2, 1, 3, 4)) == cache.nothing() == CachedPrefix(0, (0,), ((),))


def test_one_token_is_left_to_run() -> None:
    cache, pools = build()
    run(cache, pools[0], (1, 2, 3, 4))
    assert [cache.find((1, 2, 3, 4)[:length]).length for length in range(1, 5)] == [0, 0, 2, 2]
    assert cache.find((1, 2, 3, 4, 1)).length == 4


def test_each_page_is_kept_once() -> None:
    cache, pools = build()
    pages = run(cache, pools[0], (1, 2, 3, 4, 5, 6))
    cache.record((1, 2, 3, 4), (4,), [pages])
    assert [pools[0].keepers(page) for page in pages] == [1, 1, 1]
    assert pools[0].spare == 3


def test_several_tables_are_found_only_where_their_counts_are_known() -> None:
    tables = (0, 1)
    cache, pools = build(tables)
    pages = take(pools, tables, [6, 3])
    cache.record((1, 2, 3, 4, 5, 6), (6, 3), pages)
    cache.record((1, 2, 3, 4, 5, 6, 7), (7, 3), pages)  # inside a page of tokens
    assert cached(cache) == {(1, 2, 3, 4, 5, 6)}
    assert cache.find((1, 2, 3, 4, 5)) == cache.nothing()
    assert cache.find((1, 2, 3, 4, 5, 6, 9)) == CachedPrefix(6, (6, 3), tuple(map(tuple, pages)))


def test_a_deeper_record_names_only_what_is_new_and_stays_whole_when_one_comes_between() -> None:
    tables = (0, 1)
    cache, pools = build(tables)
    text = (1, 2, 3, 4, 5, 6)
    first, second = take(pools, tables, [6, 5]), take(pools, tables, [4, 3])
    cache.record(text, (2, 1), first)
    cache.record(text, (6, 5), first)
    cache.record(text, (4, 3), second)
    assert cache.find((*text, 7)) == CachedPrefix(6, (6, 5), tuple(map(tuple, first)))
    # The page of the first record's only deep entry is its own, so the second one's comes in its place.
    assert cache.find(text[:5]) == CachedPrefix(4, (4, 3), ((first[0][0], second[0][1]), tuple(second[1])))
    assert [pools[0].keepers(page) for page in first[0]] == [1, 1, 1]
    assert [pools[1].keepers(page) for page in first[1]] == [2, 1, 1]


def test_the_same_text_read_twice_keeps_the_first_pages() -> None:
    cache, pools = build()
    first = run(cache, pools[0], (1, 2, 3, 4))
    again = take(pools, (0,), [6])[0]
    cache.record((1, 2, 3, 4, 5, 6), (6,), [again])
    assert cache.find((1, 2, 3, 4, 5, 6, 7)).pages == ((*first, again[2]),)
    assert pools[0].keepers(again[0]) == 0


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache, pools = build(pages=6)
    run(cache, pools[0], (1, 1, 1, 1))
    run(cache, pools[0], (2, 2, 2, 2))
    run(cache, pools[0], (3, 3, 3, 3))
    cache.find((1, 1, 1, 1, 1))
    gone = []
    for _ in range(6):
        before = cached(cache)
        cache.evict(0)
        gone += before - cached(cache)
        pools[0].allocate()
    assert gone == [(2,) * 4, (2,) * 2, (3,) * 4, (3,) * 2, (1,) * 4, (1,) * 2]
    assert (cache.records, cache.evictions) == (0, 6)
    with pytest.raises(AssertionError):
        cache.evict(0)


def test_a_beginning_that_is_in_demand_outlives_its_last_continuation() -> None:
    cache, pools = build(pages=4)
    run(cache, pools[0], (1, 1, 1, 1))
    run(cache, pools[0], (2, 2, 2, 2))
    cache.find((1, 1, 3))  # wants the beginning only
    cache.evict(0)
    assert cached(cache) == {(1, 1), (2, 2), (2, 2, 2, 2)}
    pools[0].allocate()
    cache.evict(0)
    assert cached(cache) == {(1, 1), (2, 2)}


def test_what_is_held_is_neither_spare_nor_evicted() -> None:
    cache, pools = build(pages=5)
    run(cache, pools[0], (1, 1, 1, 1, 1, 1))
    run(cache, pools[0], (2, 2, 2, 2))
    cache.find((1, 1, 1, 1, 5), holder=7)  # the first two pages
    cache.find((2, 2, 2, 2, 2))
    assert pools[0].spare == 3
    for _ in range(3):
        cache.evict(0)
        pools[0].allocate()
    assert cached(cache) == {(1, 1), (1, 1, 1, 1)}
    with pytest.raises(AssertionError):
        cache.evict(0)
    cache.let_go(7)
    assert pools[0].spare == 2
    cache.evict(0)
    assert cached(cache) == {(1, 1)}


def test_a_holder_holds_one_record_and_those_above_it() -> None:
    cache, pools = build(pages=6)
    run(cache, pools[0], (1, 1))
    run(cache, pools[0], (2, 2))
    cache.find((1, 1, 1), holder=7)
    cache.find((2, 2, 2), holder=8)
    assert pools[0].spare == 0
    pages = take(pools, (0,), [4])
    cache.record((2, 2, 3, 3), (4,), pages, holder=7)  # it has read on in another text, and lets go of the first
    leave(pools, (0,), pages)
    assert pools[0].spare == 1
    cache.let_go(8)
    assert pools[0].spare == 1
    cache.let_go(7)
    cache.let_go(7)
    cache.find((9, 9, 9), holder=7)  # nothing
    assert (pools[0].spare, pools[0].used) == (3, 3)
    cache.clear()
    assert pools[0].used == 0


def test_pages_that_hang_above_a_record_in_use_can_be_had_when_it_is_let_go() -> None:
    """Two sequences read one beginning at once; the second one's own end hangs below the first one's pages."""
    cache, pools = build(pages=5)
    run(cache, pools[0], (1, 1, 1, 1))
    cache.record((1, 1, 1, 1, 2, 2), (6,), take(pools, (0,), [6]), holder=2)
    assert (pools[0].free, pools[0].spare) == (0, 0)
    cache.let_go(2)
    assert (pools[0].free, pools[0].spare) == (0, 2)
    for _ in range(2):
        cache.evict(0)
        pools[0].allocate()
    assert cached(cache) == set()


def test_a_record_made_between_held_ones_is_held_too() -> None:
    tables = (0, 1)
    cache, pools = build(tables)
    text = (1, 2, 3, 4)
    cache.record(text, (4, 2), take(pools, tables, [4, 2]), holder=1)
    between = take(pools, tables, [2, 1])
    cache.record(text, (2, 1), between)
    assert pools[1].owners(between[1][0]) == 2
    cache.let_go(1)
    assert pools[1].owners(between[1][0]) == 1


def test_what_is_held_can_be_forgotten_and_let_go_after() -> None:
    cache, pools = build()
    run(cache, pools[0], (1, 1, 2, 2, 3, 3))
    cache.find((1, 1, 2, 2, 3, 3, 4), holder=1)
    cache.forget((1, 1, 2, 2), beyond=2)
    assert (pools[0].used, pools[0].spare) == (1, 0)
    run(cache, pools[0], (1, 1, 2, 2))
    cache.let_go(1)
    assert (pools[0].used, pools[0].spare) == (2, 2)
    assert len(cache._leaves) <= cache.records  # what is forgotten is not remembered as a candidate for eviction
    cache.clear()
    assert pools[0].used == 0


def test_forgetting_takes_what_lies_behind_and_nothing_before() -> None:
    cache, pools = build()
    run(cache, pools[0], (1, 1, 2, 2, 3, 3))
    run(cache, pools[0], (1, 1, 4, 4))
    cache.forget((1, 1, 2, 2, 3, 3, 9), beyond=2)
    assert cached(cache) == {(1, 1), (1, 1, 4, 4)}
    cache.forget((1, 1, 4, 4), beyond=4)
    cache.forget((5, 5), beyond=0)
    assert cached(cache) == {(1, 1), (1, 1, 4, 4)}
    assert pools[0].used == 2


def test_clearing_frees_all_but_what_is_owned() -> None:
    tables = (0, 1, 1)
    cache, pools = build(tables)
    pages = take(pools, tables, [4, 3, 1])
    cache.record((1, 2, 3, 4), (4, 3, 1), pages)
    cache.clear()
    assert cache.find((1, 2, 3, 4, 5)) == cache.nothing()
    assert [pool.used for pool in pools] == [2, 3]
    leave(pools, tables, pages)
    assert [pool.used for pool in pools] == [0, 0]


texts = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([(0,), (0, 1), (0, 1, 1)]), st.lists(st.tuples(st.sampled_from("rrrfev"), texts), max_size=25))
def test_it_finds_what_a_plain_dictionary_finds(tables: tuple[int, ...], steps: list[tuple[str, tuple[int, ...]]]) -> None:
    """The slow twin: every recorded text with its counts, searched from the longest prefix down."""
    cache, pools = build(tables, pages=400)
    plain: dict[tuple[int, ...], tuple[int, ...]] = {}
    holds: dict[tuple[int, int], tuple[int, bytes]] = {}
    for step, text in steps:
        if step == "r":
            entries = tuple(len(found) for found in marks(text, len(tables)))
            pages = take(pools, tables, list(entries))
            for table, found in enumerate(marks(text, len(tables))):
                for at, mark in enumerate(found):
                    holds[tables[table], pages[table][at // SIZE] * SIZE + at % SIZE] = mark
            cache.record(text, entries, pages)
            leave(pools, tables, pages)
            ends = range(SIZE, len(text) + 1, SIZE) if len(tables) == 1 else [len(text)] * (len(text) % SIZE == 0)
            plain |= {text[:end]: tuple(len(found) for found in marks(text[:end], len(tables))) for end in ends}
        elif step == "e" and pools[-1].spare:
            before = pools[-1].free
            while pools[-1].free:
                pools[-1].allocate()
            cache.evict(len(pools) - 1)
            assert pools[-1].free >= 1
            taken = [page for page in range(400) if pools[-1].owners(page)]
            for page in taken:
                pools[-1].release([page])
            assert pools[-1].free > before
            left = cached(cache)
            assert left < set(plain)
            plain = {text: plain[text] for text in left}
        elif step == "v":
            cache.forget(text, beyond=4)
            plain = {known: counts for known, counts in plain.items() if not (len(known) > 4 and text[:6] == known[:6])}
        found = cache.find(text)
        longest = max((text[:end] for end in range(len(text)) if text[:end] in plain), key=len, default=())
        assert (found.length, found.entries) == (len(longest), plain.get(longest, (0,) * len(tables)))
        for table, wanted in enumerate(marks(longest, len(tables))):
            spots = [(found.pages[table][at // SIZE], at % SIZE) for at in range(len(wanted))]
            assert [holds[tables[table], page * SIZE + at] for page, at in spots] == wanted
        assert cached(cache) == set(plain)
        assert cache.records == len(plain)
