"""Any history of arrivals, ends, failures and late reports: no page is used by two, none is lost, nobody waits forever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.device_model import Device, marks, records, reference
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Request
from fathomlm.engine.schedule import SchedulerOutput
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence
from fathomlm.errors import QueueFull, RequestTooLarge

LONGEST = 16
LAG = 2
"""Reports come at most this many ticks late."""

STEMS = ((1, 2, 3, 1, 2, 3, 1, 2), (1, 2, 3, 1, 1), (3, 3, 3, 3, 3, 3))
token = st.integers(1, 3)
prompts = st.one_of(
    st.lists(token, min_size=1, max_size=LONGEST).map(tuple),
    st.builds(lambda stem, more: stem + tuple(more), st.sampled_from(STEMS), st.lists(token, max_size=3)),
)


@dataclass(frozen=True)
class Setup:
    tables: tuple[int, ...]
    page_size: int
    max_sequences: int
    max_queue: int
    prefill_chunk: int
    lookahead: int
    prefix_caching: bool
    pool_pages: tuple[int, ...]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    tables = draw(st.sampled_from([(0,), (0, 1), (0, 1, 1), (0, 0)]))
    size = draw(st.integers(1, 4))
    enough = [tables.count(pool) * -(-(LONGEST - 1) // size) for pool in range(max(tables) + 1)]
    extra = draw(st.sampled_from([0, 0, 1, 2, 5, 12, -1]))
    return Setup(
        tables=tables,
        page_size=size,
        max_sequences=draw(st.integers(1, 4)),
        max_queue=draw(st.integers(1, 6)),
        prefill_chunk=draw(st.integers(1, LONGEST)),
        lookahead=draw(st.integers(1, 6)),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        pool_pages=tuple(max(1, pages + extra) for pages in enough),
    )


class Engine(RuleBasedStateMachine):
    """The host and the device, with the reports on their way between them."""

    sound = False

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = Scheduler(**vars(setup), max_length=LONGEST)
        self.device = Device(tables=setup.tables, page_size=setup.page_size, prefill_chunk=setup.prefill_chunk)
        self.on_their_way: list[list] = []
        self.live: dict[int, Sequence] = {}
        self.never_placed: list[int] = []
        self.ids = 0
        self.sound = True
        self.quiet = 0  # ticks since anybody was cancelled or failed, or else hardly a text would end by itself

    @rule(requests=st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=4))
    def arrive(self, requests: list[tuple[tuple[int, ...], int]]) -> None:
        for prompt, new in requests:
            self.submit(prompt, new)

    def submit(self, prompt: tuple[int, ...], new: int) -> None:
        self.ids += 1
        sequence = Sequence(Request(id=self.ids, prompt=prompt, sampling=Sampling(max_new_tokens=new)))
        entries = len(prompt) + new - 1
        tables, pages = self.setup.tables, -(-entries // self.setup.page_size)
        fits = all(tables.count(pool) * pages <= total for pool, total in enumerate(self.setup.pool_pages))
        if entries >= LONGEST or not fits:
            with pytest.raises(RequestTooLarge):
                self.scheduler.submit(sequence)
        elif len(self.scheduler.waiting) >= self.setup.max_queue:
            with pytest.raises(QueueFull):
                self.scheduler.submit(sequence)
        else:
            self.scheduler.submit(sequence)
            self.live[sequence.id] = sequence
            self.never_placed.append(sequence.id)

    @precondition(lambda self: self.quiet >= 4)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        """Any id that was ever given out, also one that has ended or was refused."""
        self.quiet = 0
        id = which % (self.ids + 1)
        assert self.scheduler.cancel(id) == (id in self.live)
        self.ended(id)

    @precondition(lambda self: self.quiet >= 4 and self.live)
    @rule(which=st.integers(0, 20))
    def fail(self, which: int) -> None:
        self.quiet = 0
        id = sorted(self.live)[which % len(self.live)]
        self.scheduler.fail(id)
        self.ended(id)

    @rule(passes=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4))
    def ticks(self, passes: list[list[int]]) -> None:
        for each in passes:
            self.tick(each)

    def tick(self, passes: list[int]) -> None:
        self.quiet += 1
        self.sound = False
        plan = self.scheduler.schedule()
        self.first_come_first_placed(plan)
        self.device.apply(plan)
        self.on_their_way.append(self.device.tick(dict(enumerate(passes))))
        while len(self.on_their_way) > LAG:
            self.report()
        self.sound = True

    @precondition(lambda self: self.on_their_way)
    @rule()
    def report(self) -> None:
        for report in self.on_their_way.pop(0):
            sequence = self.live.get(report.id)
            current = sequence is not None and sequence.epoch == report.epoch
            assert not current or sequence.slot is not None, "a sequence that waits has the epoch of its last placement"
            if report.upto is not None:
                assert self.scheduler.confirm_prefill(report.id, report.epoch, report.upto, report.entries) == current
                continue
            assert self.scheduler.note(report.id, report.epoch, report.tokens, report.entries) == current
            if current and report.ended:
                assert sequence.tokens == reference(sequence.prompt, sequence.max_new_tokens)
                self.scheduler.finish(report.id)
                self.ended(report.id)

    def ended(self, id: int) -> None:
        sequence = self.live.pop(id, None)
        assert sequence is None or (sequence.state, sequence.slot, sequence.pages) == ("done", None, [])
        if id in self.never_placed:
            self.never_placed.remove(id)

    def first_come_first_placed(self, plan: SchedulerOutput) -> None:
        for placement in plan.placements:
            if placement.sequence.id in self.never_placed:
                assert placement.sequence.id == self.never_placed.pop(0)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        memory = self.scheduler.page_manager
        owners = Counter(
            (memory.tables[table], page)
            for sequence in self.scheduler.placed
            for table, pages in enumerate(sequence.pages)
            for page in pages
        )
        keepers = Counter(
            (memory.tables[table], page)
            for _, _, own, _ in records(memory.prefixes)
            for table, pages in enumerate(own)
            for page in pages
        )
        owners += Counter(
            (memory.tables[table], page)
            for _, _, own, held in records(memory.prefixes)
            for table, pages in enumerate(own)
            for page in pages
            if held
        )
        for index, pool in enumerate(memory.pools):
            everything = range(pool.total)
            assert [pool.owners(page) for page in everything] == [owners[index, page] for page in everything]
            assert [pool.keepers(page) for page in everything] == [keepers[index, page] for page in everything]
            held = {page for at, page in owners + keepers if at == index}
            assert (pool.used, pool.free) == (len(held), pool.total - len(held))
            assert pool.spare == sum((index, page) not in owners for page in held)

    @invariant()
    def rows_see_their_own_text(self) -> None:
        self.device.check()

    @invariant()
    def the_cache_says_the_truth(self) -> None:
        tables = self.setup.tables
        for text, prefix, *_ in records(self.scheduler.page_manager.prefixes):
            wanted = marks(text, len(tables))
            assert list(prefix.entries) == [len(entries) for entries in wanted]
            for table, pages in enumerate(prefix.pages):
                assert self.device.seen(table, pages, prefix.entries[table]) == wanted[table]

    @invariant()
    def the_queue_is_bounded(self) -> None:
        """Those that were preempted come on top: at most one a slot."""
        fresh = [sequence for sequence in self.scheduler.waiting if not sequence.preemptions]
        assert len(fresh) <= self.setup.max_queue
        assert len(self.scheduler.waiting) <= self.setup.max_queue + self.setup.max_sequences
        assert {s.id for s in self.scheduler.waiting} | {s.id for s in self.scheduler.placed} == set(self.live)

    @invariant()
    def who_runs_is_counted(self) -> None:
        states = Counter(sequence.state for sequence in self.scheduler.placed)
        counters = self.scheduler.counters()
        assert self.scheduler.running == counters.running == states["running"]
        assert counters.prefilling == states["prefilling"]

    def teardown(self) -> None:
        """Without new arrivals everything ends: the oldest gets on with each report, and each becomes the oldest."""
        if not self.sound:
            return  # a check has failed before: that is the failure to report
        ticks = 10 + sum(2 + LONGEST for _ in self.live) * (LAG + 2)
        while self.scheduler.busy:
            self.tick([9, 9, 9, 9])
            self.rows_see_their_own_text()
            ticks -= 1
            assert ticks, "somebody waits forever"
        assert not self.device.rows
        self.scheduler.page_manager.prefixes.clear()
        assert [pool.free for pool in self.scheduler.page_manager.pools] == list(self.setup.pool_pages)


@pytest.mark.parametrize("seed", range(24))
def test_long_busy_histories(seed: int) -> None:
    """Hypothesis seeks short histories and shrinks them; here the pools stay crowded for hundreds of ticks."""
    random = Random(seed)
    tables, size, slots = ((0,), (0, 1), (0, 1, 1), (0, 0))[seed % 4], random.randint(2, 4), random.randint(2, 4)
    enough = [tables.count(pool) * -(-(LONGEST - 1) // size) for pool in range(max(tables) + 1)]
    pages = tuple(pages + random.choice((0, 1, pages // 2, pages)) for pages in enough)
    engine = Engine()
    engine.start(Setup(tables, size, slots, 5, random.choice((1, 3, 8, LONGEST)), random.randint(1, 6), seed % 5 > 0, pages))
    for step in range(300):
        if len(engine.scheduler.waiting) < 2:
            stem = random.choice((*STEMS, ()))
            more = tuple(random.choices((1, 2, 3), k=random.randint(0 if stem else 1, 3)))
            engine.submit(stem + more, random.randint(1, LONGEST - len(stem + more)))
        if step % 30 == 20:
            (engine.cancel if random.random() < 0.5 else engine.fail)(random.randint(0, 20))
        engine.tick(random.choices(range(10), k=4))
        if engine.on_their_way and random.random() < 0.3:
            engine.report()
        for check in (engine.every_page_is_accounted_for, engine.rows_see_their_own_text, engine.the_cache_says_the_truth):
            check()
        engine.the_queue_is_bounded()
    engine.teardown()


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
