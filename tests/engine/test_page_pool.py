"""The page pool: numbers handed out once, held by owners and keepers, free when nobody holds them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathomlm.engine.page_pool import PagePool


def test_pages_are_handed_out_once_and_the_latest_freed_comes_first() -> None:
    pool = PagePool(3)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.free, pool.used, pool.total) == (0, 3, 3)
    pool.release([0])
    pool.release([2])
    assert pool.allocate(2) == [2, 0]


def test_a_shared_page_is_free_when_the_last_owner_goes() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate()
    pool.share([page])
    pool.release([page])
    assert pool.free == 0
    pool.release([page])
    assert pool.free == 1


def test_a_kept_page_is_spare_without_owners_and_free_without_keepers() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate()
    pool.keep([page])
    assert (pool.free, pool.spare, pool.available) == (1, 0, 1)
    pool.release([page])
    assert (pool.free, pool.spare, pool.available) == (1, 1, 2)
    pool.share([page])
    assert (pool.free, pool.spare, pool.available) == (1, 0, 1)
    pool.drop([page])
    assert (pool.free, pool.spare, pool.used) == (1, 0, 1)
    pool.release([page])
    assert (pool.free, pool.spare, pool.used) == (2, 0, 0)


@pytest.mark.parametrize("call", ["share", "release", "keep", "drop"])
@pytest.mark.parametrize("page", [0, 1, 2, -1])
def test_wrong_calls_are_bugs(call: str, page: int) -> None:
    """Page 0 was freed, page 1 never handed out, the others do not exist."""
    pool = PagePool(2)
    pool.release(pool.allocate())
    with pytest.raises((AssertionError, IndexError)):
        getattr(pool, call)([page])
    assert (pool.free, pool.spare) == (2, 0)


def test_an_owner_cannot_give_up_for_a_keeper_nor_the_other_way() -> None:
    pool = PagePool(2)
    owned, kept = pool.allocate(2)
    pool.keep([kept])
    pool.release([kept])
    with pytest.raises(AssertionError):
        pool.drop([owned])
    with pytest.raises(AssertionError):
        pool.release([kept])


def test_an_empty_pool_hands_out_nothing() -> None:
    pool = PagePool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="all 1 pages"):
        pool.allocate()
    with pytest.raises(AssertionError):
        PagePool(0)


calls = st.tuples(st.sampled_from(["allocate", "share", "release", "keep", "drop"]), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(calls, max_size=60))
def test_the_counts_are_those_of_a_plain_tally(calls: list[tuple[str, int]]) -> None:
    """The slow twin counts holders; the pool must allow just what makes sense, and agree on every number."""
    pool, owners, keepers = PagePool(4), Counter(), Counter()
    for call, page in calls:
        held = owners[page] or keepers[page]
        if call == "allocate":
            if pool.free:
                (given_out,) = pool.allocate()
                assert not owners[given_out]
                assert not keepers[given_out]
                owners[given_out] += 1
        elif {"share": held, "keep": held, "release": owners[page], "drop": keepers[page]}[call]:
            getattr(pool, call)([page])
            tally = owners if call in ("share", "release") else keepers
            tally[page] += 1 if call in ("share", "keep") else -1
        used = [page for page in range(4) if owners[page] or keepers[page]]
        assert (pool.used, pool.free) == (len(used), 4 - len(used))
        assert pool.spare == sum(not owners[page] for page in used)
        assert pool.available == pool.free + pool.spare
        assert [(pool.owners(page), pool.keepers(page)) for page in range(4)] == [(owners[p], keepers[p]) for p in range(4)]
