"""The scheduler's rules, one by one. tests/engine/test_scheduler_machine.py holds them against any history."""

from __future__ import annotations

import pytest

from engine.scheduling import build, granted, ids, placed, read_all, rooms, run, submit
from fathomlm.engine.schedule import PrefillChunk, SchedulerOutput
from fathomlm.errors import FathomError, QueueFull, RequestTooLarge


def test_a_text_beyond_the_longest_is_refused_with_the_numbers() -> None:
    scheduler = build(max_length=10)
    submit(scheduler, 1, 6, new=4)
    with pytest.raises(RequestTooLarge, match=r"a prompt of 7 tokens and up to 4 new ones are 11 positions; .* at most 10"):
        submit(scheduler, 2, 7, new=4)
    assert issubclass(RequestTooLarge, FathomError)
    assert ids(scheduler.waiting) == [1]


def test_what_could_never_fit_is_refused_and_what_just_fits_is_not() -> None:
    """Two deep tables share a pool: 7 entries are 4 pages in each. The last token is never stored."""
    scheduler = build(tables=(0, 1, 1), pool_pages=(4, 8))
    submit(scheduler, 1, 4, new=4)
    scheduler = build(tables=(0, 1, 1), pool_pages=(4, 7))
    with pytest.raises(RequestTooLarge, match=r"8 pages of 2 entries in pool 1, which has 7"):
        submit(scheduler, 1, 4, new=4)


def test_the_queue_is_bounded() -> None:
    scheduler = build(max_queue=2)
    submit(scheduler, 1, 1)
    submit(scheduler, 2, 1)
    with pytest.raises(QueueFull, match="2 requests are waiting and the queue holds 2"):
        submit(scheduler, 3, 1)
    scheduler.schedule()
    submit(scheduler, 3, 1)


def test_one_known_token_runs_at_once() -> None:
    scheduler = build(lookahead=3)
    sequence = submit(scheduler, 1, 1)
    plan = scheduler.schedule()
    (placement,) = plan.placements
    assert placement.ready
    assert (placement.sequence, placement.entries, placement.epoch) == (sequence, (0,), sequence.epoch)
    assert (sequence.state, plan.chunks) == ("running", [])
    assert rooms(plan) == {(sequence.slot, 0): 4}


def test_all_but_the_last_token_is_read_within_the_budget() -> None:
    scheduler = build(prefill_chunk=5)
    one, two = submit(scheduler, 1, 8), submit(scheduler, 2, 3)
    first = scheduler.schedule()
    assert first.chunks == [PrefillChunk(one.slot, one.epoch, 0, 5, last=False)]
    assert placed(first) == [1]
    second = scheduler.schedule()  # the device has not reported yet
    assert placed(second) == [2]
    expected = [PrefillChunk(one.slot, one.epoch, 5, 2, last=True), PrefillChunk(two.slot, two.epoch, 0, 2, last=True)]
    assert second.chunks == expected
    assert scheduler.schedule().chunks == []
    assert scheduler.confirm_prefill(1, one.epoch, 5, (5,))
    assert one.state == "prefilling"
    assert scheduler.confirm_prefill(1, one.epoch, 7, (7,))
    assert (one.state, two.state) == ("running", "prefilling")


def test_while_it_reads_every_table_has_room_for_every_token() -> None:
    few = {"max_sequences": 30, "pool_pages": (50, 50)}  # no page more than is needed
    scheduler = build(tables=(0, 1, 1), page_size=1, prefill_chunk=3, lookahead=2, prefix_caching=False, **few)
    sequence = submit(scheduler, 1, 6, new=10)
    plan = scheduler.schedule()
    assert rooms(plan) == {(sequence.slot, table): 3 for table in range(3)}
    read_all(scheduler, plan, deep=(1, 0))
    plan = scheduler.schedule()
    assert plan.chunks == [PrefillChunk(sequence.slot, sequence.epoch, 3, 2, last=True)]
    assert rooms(plan) == {(sequence.slot, table): at + 2 + 2 for table, at in enumerate((3, 1, 0))}  # chunk and lookahead


def test_several_tables_are_read_to_multiples_of_the_page_size() -> None:
    """Only there their counts can be cached. One table is known everywhere, so it is not cut."""
    for tables, pools, counts in (((0, 1), (50, 50), [8, 1]), ((0,), (50,), [9])):
        scheduler = build(tables=tables, pool_pages=pools, page_size=4)
        submit(scheduler, 1, 10)
        assert [chunk.count for _ in counts for chunk in scheduler.schedule().chunks] == counts
    scheduler = build(tables=(0, 1), pool_pages=(50, 50), page_size=4, prefix_caching=False)
    submit(scheduler, 1, 10)
    assert [chunk.count for chunk in scheduler.schedule().chunks] == [9]


def test_a_chunk_shrinks_to_the_free_pages_before_anybody_is_preempted() -> None:
    scheduler = build(pool_pages=(6,), prefill_chunk=5, prefix_caching=False)
    one, two = submit(scheduler, 1, 2, new=10), submit(scheduler, 2, 11, new=1)
    plan = scheduler.schedule()
    assert [chunk.count for chunk in plan.chunks] == [1, 4]
    read_all(scheduler, plan)
    run(scheduler, one)
    plan = scheduler.schedule()
    assert (plan.stops, [chunk.count for chunk in plan.chunks]) == ([], [4])
    assert scheduler.page_manager.pools[0].free == 0
    slot = two.slot
    assert scheduler.schedule().stops == [slot]  # not even one token fits, and nobody came later


def test_room_runs_ahead_by_the_lookahead_and_ends_with_the_text() -> None:
    scheduler = build(page_size=1, pool_pages=(7,), lookahead=3)
    sequence = submit(scheduler, 1, 3, new=4)
    plan = scheduler.schedule()
    assert rooms(plan) == {(sequence.slot, 0): 2 + 3}
    assert [(table, index) for table, index, _ in granted(plan, sequence)] == [(0, at) for at in range(5)]
    read_all(scheduler, plan)
    assert scheduler.schedule() == SchedulerOutput()
    run(scheduler, sequence, 2)
    assert rooms(scheduler.schedule()) == {(sequence.slot, 0): 3 + 4 - 1}
    run(scheduler, sequence, 1)
    assert rooms(scheduler.schedule()) == {}


def test_where_pages_are_plenty_they_come_several_at_a_time() -> None:
    """The fewer the less is free, and never at the cost of a cached prefix."""
    for free, ahead in ((1000, 64), (20, 3), (12, 1), (11, 0)):
        scheduler = build(page_size=1, pool_pages=(1000,), lookahead=3)
        if free < 1000:
            scheduler.page_manager.pools[0].allocate(1000 - free)
        sequence = submit(scheduler, 1, 1, new=99)
        assert rooms(scheduler.schedule()) == {(sequence.slot, 0): 3 + ahead}
        run(scheduler, sequence, ahead)
        assert scheduler.schedule() == SchedulerOutput()
        run(scheduler, sequence, 1)
        assert scheduler.schedule().grants


def test_a_longer_lookahead_holds_for_those_that_run_already() -> None:
    scheduler = build(page_size=1, pool_pages=(100,), max_sequences=60)
    one, two = submit(scheduler, 1, 1, new=50), submit(scheduler, 2, 1, new=50)
    assert rooms(scheduler.schedule()) == {(one.slot, 0): 1, (two.slot, 0): 1}
    assert scheduler.schedule() == SchedulerOutput()
    scheduler.lookahead = 7
    assert rooms(scheduler.schedule()) == {(one.slot, 0): 7, (two.slot, 0): 7}
    assert scheduler.schedule() == SchedulerOutput()


def test_lookahead_never_preempts_but_takes_cached_pages() -> None:
    scheduler = build(page_size=1, pool_pages=(8,), lookahead=5)
    old = submit(scheduler, 9, 3, new=1)
    read_all(scheduler, scheduler.schedule())
    run(scheduler, old)
    scheduler.finish(9)
    assert scheduler.counters().pages_cached == (3,)
    one, two = submit(scheduler, 1, 1, new=8), submit(scheduler, 2, 1, new=8)
    plan = scheduler.schedule()
    assert placed(plan) == [1, 2]
    assert rooms(plan) == {(one.slot, 0): 5, (two.slot, 0): 3}
    assert (scheduler.counters().pages_cached, scheduler.counters().evictions) == ((0,), 3)
    run(scheduler, one, 4)
    assert (scheduler.schedule().stops, len(one.pages[0])) == ([], 5)  # a token fits: more is not worth a preemption
    run(scheduler, one, 1)
    slot = two.slot
    assert scheduler.schedule().stops == [slot]
    assert len(one.pages[0]) == 8


def test_the_latest_is_preempted_for_the_oldest_and_comes_back_first() -> None:
    scheduler = build(page_size=1, pool_pages=(9,), prefix_caching=False)
    one, two = submit(scheduler, 1, 3, new=7), submit(scheduler, 2, 3, new=4)
    read_all(scheduler, scheduler.schedule())
    three = submit(scheduler, 3, 2)
    read_all(scheduler, scheduler.schedule())
    run(scheduler, one)
    run(scheduler, two)
    scheduler.schedule()
    run(scheduler, one)
    assert ids(scheduler.placed) == [1, 2]
    epoch, slot = two.epoch, two.slot
    assert scheduler.page_manager.pools[0].free == 1
    scheduler.schedule()
    run(scheduler, one)
    plan = scheduler.schedule()
    assert plan.stops == [slot]
    assert ids(scheduler.waiting) == [2, 3]
    assert (two.state, two.slot, two.pages, two.preemptions) == ("waiting", None, [], 1)
    assert placed(plan) == []  # it would come straight back
    assert two.epoch != epoch
    assert not scheduler.note(2, epoch, [7], (4,))
    assert two.tokens == [2500]
    assert three.state == "waiting"

    run(scheduler, one, 1)
    scheduler.finish(1)
    plan = scheduler.schedule()
    assert placed(plan) == [2, 3]
    assert two.epoch > epoch
    assert plan.chunks[0] == PrefillChunk(two.slot, two.epoch, 0, 3, last=True)  # the prompt; its one new token runs


def test_who_was_preempted_is_not_placed_at_once_but_in_the_next_plan() -> None:
    """In the same plan it would often take the very pages that were freed. A later, longer one does not block it."""
    scheduler = build(page_size=1, pool_pages=(9,), prefill_chunk=4, prefix_caching=False)
    one, two = submit(scheduler, 1, 1, new=9), submit(scheduler, 2, 3, new=5)
    read_all(scheduler, scheduler.schedule())
    submit(scheduler, 3, 8, new=1)
    for _ in range(4):
        run(scheduler, two)
        assert placed(scheduler.schedule()) == []
    run(scheduler, one)
    assert placed(scheduler.schedule()) == []
    assert scheduler.page_manager.pools[0].free == 0
    run(scheduler, one)
    plan = scheduler.schedule()
    assert (len(plan.stops), placed(plan), ids(scheduler.waiting)) == (1, [], [2, 3])
    assert scheduler.page_manager.pools[0].free == 6
    assert placed(scheduler.schedule()) == [2]


def test_reports_of_an_earlier_placement_do_not_count() -> None:
    scheduler = build()
    sequence = submit(scheduler, 1, 3)
    scheduler.schedule()
    assert not scheduler.confirm_prefill(1, sequence.epoch - 1, 2, (2,))
    assert not scheduler.confirm_prefill(7, sequence.epoch, 2, (2,))
    assert scheduler.confirm_prefill(1, sequence.epoch, 2, (2,))
    assert not scheduler.note(1, sequence.epoch + 1, [5], (3,))
    assert scheduler.note(1, sequence.epoch, [5], (3,))
    assert (sequence.tokens, sequence.entries) == ([5], [3])


def test_slot_and_epoch_name_a_placement_whoever_it_was() -> None:
    scheduler = build(max_sequences=1)
    seen = set()
    for id in range(3):
        sequence = submit(scheduler, id, 1)
        scheduler.schedule()
        seen.add((sequence.slot, sequence.epoch))
        assert sequence.slot == 0
        scheduler.cancel(id)
    assert len(seen) == 3


def test_reports_that_cannot_be_are_bugs() -> None:
    scheduler = build()
    sequence = submit(scheduler, 1, 5, new=2)
    scheduler.schedule()
    epoch = sequence.epoch
    with pytest.raises(AssertionError, match="but has run"):
        scheduler.note(1, epoch, [5], (5,))
    with pytest.raises(AssertionError, match="5 of 4"):
        scheduler.confirm_prefill(1, epoch, 5, (5,))
    with pytest.raises(AssertionError, match="3 entries of 4 tokens"):
        scheduler.confirm_prefill(1, epoch, 4, (3,))
    assert scheduler.confirm_prefill(1, epoch, 4, (4,))
    with pytest.raises(AssertionError, match="then 7 of 6 entries"):
        scheduler.note(1, epoch, [5], (7,))
    with pytest.raises(AssertionError, match="too many"):
        scheduler.note(1, epoch, [5, 5], (6,))


def test_a_text_that_is_complete_must_be_finished_before_the_next_plan() -> None:
    scheduler = build()
    sequence = submit(scheduler, 1, 1, new=1)
    scheduler.schedule()
    run(scheduler, sequence)
    with pytest.raises(AssertionError, match="finish it"):
        scheduler.schedule()


def test_a_short_text_does_not_overtake_a_long_one() -> None:
    scheduler = build(pool_pages=(8,), prefix_caching=False)
    submit(scheduler, 1, 8)
    submit(scheduler, 2, 10)
    submit(scheduler, 3, 1)
    assert placed(scheduler.schedule()) == [1]
    assert ids(scheduler.waiting) == [2, 3]
    scheduler.cancel(2)
    assert placed(scheduler.schedule()) == [3]


def test_a_newcomer_leaves_a_page_to_those_who_run() -> None:
    """The first takes 2 of the pages, the second needs 2, and one must stay free; if it is alone, it need not."""
    for pages, expected in ((4, [1]), (5, [1, 2])):
        scheduler = build(pool_pages=(pages,), prefix_caching=False)
        submit(scheduler, 1, 3, new=2)
        submit(scheduler, 2, 3, new=2)
        assert placed(scheduler.schedule()) == expected
    scheduler = build(pool_pages=(2,), prefix_caching=False)
    submit(scheduler, 1, 3, new=2)
    assert placed(scheduler.schedule()) == [1]


def test_a_placement_has_pages_for_its_whole_first_chunk() -> None:
    """Even where the budget of this plan would give it less: what is let in should be able to go on."""
    scheduler = build(page_size=1, pool_pages=(20,), prefill_chunk=10, prefix_caching=False)
    submit(scheduler, 1, 9, new=1)
    submit(scheduler, 2, 12, new=1)
    assert placed(scheduler.schedule()) == [1]
    scheduler = build(page_size=1, pool_pages=(21,), prefill_chunk=10, prefix_caching=False)
    submit(scheduler, 1, 9, new=1)
    submit(scheduler, 2, 12, new=1)
    plan = scheduler.schedule()
    assert placed(plan) == [1, 2]
    assert [chunk.count for chunk in plan.chunks] == [8, 2]


def test_slots_are_used_again_with_a_stop_before() -> None:
    scheduler = build(max_sequences=1)
    one = submit(scheduler, 1, 3)
    submit(scheduler, 2, 3)
    scheduler.schedule()
    slot = one.slot
    scheduler.finish(1)
    plan = scheduler.schedule()
    assert (plan.stops, [placement.slot for placement in plan.placements]) == ([slot], [slot])
    assert scheduler.schedule().stops == []


def test_a_head_that_does_not_fit_is_not_looked_at_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = build(pool_pages=(6,))
    one = submit(scheduler, 1, 8)
    submit(scheduler, 2, 10, new=2)
    looks = []
    find = scheduler.page_manager.find
    monkeypatch.setattr(scheduler.page_manager, "find", lambda sequence: looks.append(sequence.id) or find(sequence))
    plans = [scheduler.schedule() for _ in range(5)]
    assert looks == [1, 2]
    read_all(scheduler, plans[0])
    run(scheduler, one)
    for _ in range(5):
        scheduler.schedule()
    assert looks == [1, 2, 2]
    scheduler.finish(1)
    assert placed(scheduler.schedule()) == [2]
