"""How sequences end, and what they leave in the prefix cache for others."""

from __future__ import annotations

import pytest

from engine.scheduling import build, granted, placed, read_all, run, submit
from fathomlm.engine.schedule import PageCopy, PrefillChunk


def test_cancelling_works_anywhere_and_for_anybody() -> None:
    scheduler = build(max_sequences=1)
    one, two = submit(scheduler, 1, 3), submit(scheduler, 2, 3)
    slot = scheduler.schedule().placements[0].slot
    assert scheduler.cancel(2)
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    assert not scheduler.cancel(99)
    assert (one.state, two.state) == ("done", "done")
    assert scheduler.page_manager.pools[0].used == 0
    assert scheduler.busy  # the device does not know yet
    assert scheduler.schedule().stops == [slot]
    assert not scheduler.busy


def test_only_what_is_there_finishes_or_fails() -> None:
    scheduler = build()
    for end in (scheduler.finish, scheduler.fail):
        with pytest.raises(AssertionError, match="no sequence 5"):
            end(5)
    submit(scheduler, 1, 3)
    scheduler.finish(1)  # its text ended on a stop string while it waited to run again
    assert not scheduler.busy


def test_a_failure_leaves_nothing_of_its_own_to_others() -> None:
    scheduler = build()
    submit(scheduler, 1, (1, 2, 3, 4, 5))
    read_all(scheduler, scheduler.schedule())
    scheduler.finish(1)
    submit(scheduler, 2, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    read_all(scheduler, scheduler.schedule())
    assert scheduler.page_manager.prefixes.records == 4
    scheduler.fail(2)
    assert scheduler.page_manager.prefixes.records == 2
    submit(scheduler, 3, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert scheduler.schedule().placements[0].entries == (4,)


def test_a_failure_after_a_preemption_takes_back_what_the_first_placement_cached() -> None:
    scheduler = build(page_size=1, pool_pages=(10,))
    one, two = submit(scheduler, 1, 4, new=7), submit(scheduler, 2, 4, new=2)
    read_all(scheduler, scheduler.schedule())
    for _ in range(3):
        run(scheduler, one)
        scheduler.schedule()
    assert two.preemptions == 1
    scheduler.cancel(1)
    scheduler.page_manager.prefixes.forget(one.known, beyond=0)
    assert scheduler.schedule().placements[0].entries[0] > 0  # found what it had cached itself
    scheduler.fail(2)
    assert scheduler.page_manager.prefixes.records == 0


def test_a_cached_beginning_is_shared_and_not_read_again() -> None:
    scheduler = build()
    one = submit(scheduler, 1, (1, 2, 3, 4, 5, 6))
    read_all(scheduler, scheduler.schedule())
    two = submit(scheduler, 2, (1, 2, 3, 4, 7, 8))
    plan = scheduler.schedule()
    (placement,) = plan.placements
    assert placement.entries == (4,)
    assert not placement.ready
    assert plan.chunks == [PrefillChunk(two.slot, two.epoch, 4, 1, last=True)]
    assert two.pages[0][:2] == one.pages[0][:2]
    assert not set(two.pages[0][2:]) & set(one.pages[0])
    assert granted(plan, two) == [(0, index, page) for index, page in enumerate(two.pages[0])]
    assert plan.copies == []
    assert scheduler.counters().prefix_hits == 4


def test_a_text_that_is_cached_but_for_its_last_token_runs_at_once() -> None:
    scheduler = build()
    submit(scheduler, 1, (1, 2, 3, 4, 5))
    read_all(scheduler, scheduler.schedule())
    two = submit(scheduler, 2, (1, 2, 3, 4, 6))
    plan = scheduler.schedule()
    assert plan.placements[0].ready
    assert (two.state, plan.chunks) == ("running", [])


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    """Position p is complete in every layer when the token behind it is known; the last one may be half way."""
    scheduler = build()
    one = submit(scheduler, 1, (1, 2, 3), new=6)
    read_all(scheduler, scheduler.schedule())
    assert scheduler.note(1, one.epoch, [4, 5], (4,))
    scheduler.schedule()
    assert scheduler.note(1, one.epoch, [], (5,))
    scheduler.schedule()
    assert scheduler.note(1, one.epoch, [6], (6,))  # six known tokens: the sixth has begun to run
    scheduler.cancel(1)
    submit(scheduler, 2, (1, 2, 3, 4, 5, 6, 7, 8))
    assert scheduler.schedule().placements[0].entries == (4,)


def test_a_partly_filled_page_is_copied_and_its_owner_goes_on() -> None:
    scheduler = build(tables=(0, 1), pool_pages=(20, 20))
    one = submit(scheduler, 1, (1, 2, 3, 4, 5))
    read_all(scheduler, scheduler.schedule(), deep=(3,))
    two = submit(scheduler, 2, (1, 2, 3, 4, 6, 7))
    plan = scheduler.schedule()
    assert plan.placements[0].entries == (4, 3)
    assert plan.copies == [PageCopy(1, one.pages[1][1], two.pages[1][1])]
    assert two.pages[0][:2] == one.pages[0][:2]
    assert two.pages[1][0] == one.pages[1][0]
    assert not set(two.pages[1][1:]) & set(one.pages[1])
    grants = granted(plan, two)
    assert sorted(grants) == [(table, index, page) for table in (0, 1) for index, page in enumerate(two.pages[table])]
    scheduler.cancel(1)
    assert scheduler.page_manager.pools[1].owners(plan.copies[0].source) == 1  # the record, held for the second
    scheduler.cancel(2)
    assert scheduler.counters().pages_cached == scheduler.counters().pages_used == (2, 2)


def test_who_has_no_share_of_the_budget_gets_no_page() -> None:
    scheduler = build(tables=(0, 1), pool_pages=(50, 50), prefill_chunk=4)
    submit(scheduler, 9, (7, 8, 9))
    read_all(scheduler, scheduler.schedule(), deep=(1,))
    scheduler.cancel(9)
    submit(scheduler, 1, 6)
    submit(scheduler, 2, 20)
    three = submit(scheduler, 3, (7, 8, 1, 2, 3, 4, 5))
    assert [chunk.count for _ in range(2) for chunk in scheduler.schedule().chunks] == [4, 1, 2, 1]
    assert (three.prefilled, three.confirmed, three.entries[1], len(three.pages[1])) == (3, 2, 1, 1)  # of a page of two
    plan = scheduler.schedule()
    assert [chunk.count for chunk in plan.chunks] == [4]  # of the second
    assert len(three.pages[1]) == 1


def test_pages_that_a_plan_copies_from_stay_as_they_are() -> None:
    """Two texts with two half-full pages each. There would be room for the second in the pages that the first copies."""
    scheduler = build(tables=(0, 1, 1), pool_pages=(20, 20), prefill_chunk=4)
    for id, text in enumerate(((1, 2, 3, 4, 5), (6, 7, 8, 9, 10))):
        submit(scheduler, id, text, new=1)
        read_all(scheduler, scheduler.schedule(), deep=(1, 1))
        scheduler.cancel(id)
    assert scheduler.counters().pages_cached == (4, 4)
    for _ in range(13):
        scheduler.page_manager.pools[1].allocate()
    submit(scheduler, 3, (1, 2, 3, 4, 11), new=1)
    submit(scheduler, 4, (6, 7, 8, 9, 12), new=1)
    plan = scheduler.schedule()
    assert (placed(plan), len(plan.copies)) == ([3], 2)
    assert not {copy.source for copy in plan.copies} & {copy.target for copy in plan.copies}
    scheduler.cancel(3)
    plan = scheduler.schedule()
    assert (placed(plan), len(plan.copies)) == ([4], 2)


def test_a_sequence_lets_go_of_cached_pages_before_anybody_is_preempted() -> None:
    """Two read the same text at once, so the second has pages of its own beside those that the first has cached."""
    scheduler = build(page_size=1, pool_pages=(9,), max_sequences=5)
    submit(scheduler, 1, (1, 2, 3, 4))
    two = submit(scheduler, 2, (1, 2, 3, 5))
    read_all(scheduler, scheduler.schedule())
    scheduler.finish(1)
    submit(scheduler, 3, 1)
    assert placed(scheduler.schedule()) == [3]
    run(scheduler, two)
    scheduler.schedule()
    assert (scheduler.page_manager.pools[0].free, scheduler.counters().pages_cached) == (0, (0,))
    run(scheduler, two)
    assert (scheduler.schedule().stops, len(two.pages[0])) == ([], 6)
    counters = scheduler.counters()
    assert (counters.preemptions, counters.evictions, counters.pages_cached) == (0, 1, (2,))


def test_alone_a_text_shares_its_beginning_even_in_the_smallest_pool() -> None:
    scheduler = build(pool_pages=(3,))
    submit(scheduler, 1, (1, 2, 3, 4, 5), new=1)
    read_all(scheduler, scheduler.schedule())
    scheduler.cancel(1)
    submit(scheduler, 2, (1, 2, 3, 4, 6), new=2)
    assert scheduler.schedule().placements[0].entries == (4,)


def test_a_prefix_that_is_in_its_own_way_is_given_up() -> None:
    """The text needs all 3 deep pages and a fourth to copy from. Nobody else would ever free one."""
    scheduler = build(tables=(0, 1), pool_pages=(4, 3))
    text = (1, 2, 3, 4, 5)
    submit(scheduler, 1, text, new=1)
    read_all(scheduler, scheduler.schedule(), deep=(3,))
    scheduler.cancel(1)
    two = submit(scheduler, 2, (*text, 6), new=1)
    plan = scheduler.schedule()
    assert (placed(plan), plan.placements[0].entries, plan.copies) == ([2], (0, 0), [])
    read_all(scheduler, plan, deep=(4,))
    scheduler.schedule()
    assert len(two.pages[1]) == 3


def test_no_prefixes_are_kept_when_they_are_not_wanted() -> None:
    scheduler = build(prefix_caching=False)
    submit(scheduler, 1, (1, 2, 3, 4, 5))
    read_all(scheduler, scheduler.schedule())
    scheduler.finish(1)
    assert scheduler.page_manager.pools[0].used == 0
    submit(scheduler, 2, (1, 2, 3, 4, 5))
    assert scheduler.schedule().placements[0].entries == (0,)


def test_the_counters_say_where_it_stands() -> None:
    scheduler = build(max_sequences=2, lookahead=2)
    one = submit(scheduler, 1, 5)
    submit(scheduler, 2, 4)
    submit(scheduler, 3, 4)
    plan = scheduler.schedule()
    assert scheduler.confirm_prefill(1, one.epoch, 4, (4,))
    counters = scheduler.counters()
    assert (counters.queued, counters.prefilling, counters.running) == (1, 1, 1)
    assert counters.pages_used == (sum(len(grant.pages) for grant in plan.grants),)
    assert (counters.pages_cached, counters.preemptions, counters.prefix_hits, counters.evictions) == ((0,), 0, 0, 0)
    scheduler.finish(1)
    assert scheduler.counters().pages_cached == (2,)
