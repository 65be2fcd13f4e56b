"""Bursts become longer where the device waits for the host, and sequences come out the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decode.exit_models import build, exiting, mixing_threshold
from engine.test_engine import SMALL, _nothing_is_left, many, routed_model
from engine.test_engine_exits import Anything
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.engine import burst_length, sizing
from fathomlm.engine.burst_length import LATE, PATIENCE, BurstLength
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Request
from fathomlm.engine.runner import Runner
from fathomlm.engine.scheduler import Scheduler


def watched(length: BurstLength, idle: bool, times: int, *, roomy: bool = True) -> int:
    """The length after so many bursts."""
    for _ in range(times):
        length.observe(idle, roomy)
    return length.steps


def test_bursts_are_doubled_where_the_device_waits_again_and_again() -> None:
    length = BurstLength(4, 16)
    assert watched(length, True, LATE - 1) == 4
    assert watched(length, False, 1) == 4
    assert watched(length, True, LATE - 1) == 4, "the row was broken"
    assert watched(length, True, 1) == 8
    assert [watched(length, True, LATE) for _ in range(2)] == [16, 16]


def test_shorter_bursts_are_tried_after_a_long_time_and_ever_more_rarely() -> None:
    length = BurstLength(4, 8)
    assert watched(length, True, LATE) == 8
    for waits in (PATIENCE, 2 * PATIENCE, 4 * PATIENCE):
        assert watched(length, False, waits - 1) == 8
        assert watched(length, False, 1) == 4
        assert watched(length, True, LATE) == 8, "too short once more"


def test_bursts_are_short_where_memory_is() -> None:
    length = BurstLength(2, 8)
    assert watched(length, True, 2 * LATE) == 8
    assert length.observe(True, False)
    assert length.steps == 2
    assert watched(length, True, 8 * LATE, roomy=False) == 2
    assert not length.observe(True, False)


def test_who_may_have_longer_bursts() -> None:
    def most(*, gpu: bool = True, drafts: bool = False, **options: Any) -> int:
        return sizing.longer_bursts(EngineOptions(**options), gpu, drafts=drafts)

    assert most() == burst_length.LONGER
    assert most(gpu=False) == most(drafts=True) == most(burst=4) == most(batch_size=1) == most(lag=0) == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "scarce"])
@pytest.mark.parametrize("kind", ["plain", "routed", "parallel"])
def test_texts_are_the_same_whatever_the_bursts(kind: str, roomy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, lengths = random.Random(3), set[int]()
    monkeypatch.setattr(sizing, "longer_bursts", lambda *args, **drafts: 4)
    if roomy:
        monkeypatch.setattr(sizing, "CPU_ROOM", 1 << 30)
    else:  # harder than it comes: long bursts although pages are short
        monkeypatch.setattr(Scheduler, "roomy", property(lambda scheduler: draw.random() < 0.9))
    monkeypatch.setattr(burst_length, "LATE", 1)
    monkeypatch.setattr(burst_length, "PATIENCE", 2)
    monkeypatch.setattr(Runner, "idle", property(lambda runner: draw.random() < 0.7))
    model = routed_model() if kind == "routed" else build("vanilla")
    leaves = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla")) if kind == "parallel" else None
    work = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=new, ignore_eos=True))
        for i, (prompt, new) in enumerate(zip(3 * many(model), 6 * (12, 26, 3, 15, 31, 7), strict=False))
    ]
    alone = [generate(model, [list(request.prompt)], request.sampling, exiting=leaves)[0].tokens for request in work]
    engine = Engine(model, exiting=leaves, **(SMALL | {"burst": 2, "lag": 1, "max_sequences": 5}))
    launch = engine.runner.launch_burst

    def launched(steps: int, *args: Any) -> list[int]:
        lengths.add(steps)
        return launch(steps, *args)

    monkeypatch.setattr(engine.runner, "launch_burst", launched)
    assert [result.tokens for result in engine.run(work)] == alone
    _nothing_is_left(engine)
    assert {2, 4, 8} <= lengths
    assert (engine.counters().preemptions > 0) != roomy


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is always idle, and bursts may become four times as long."""
    monkeypatch.setattr(sizing, "longer_bursts", lambda *args, **drafts: 4)
    monkeypatch.setattr(Runner, "idle", property(lambda runner: True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("sequences", "longest"), [(6, 8), (4, 2)], ids=["overbooked", "not"])
def test_bursts_become_longer_where_requests_wait_and_rows_stay_full(
    sequences: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "longer_bursts", lambda *args, **drafts: 4)
    monkeypatch.setattr(sizing, "CPU_ROOM", 1 << 30)
    engine = Engine(routed_model(), **(SMALL | {"burst": 2, "lag": 1, "max_sequences": sequences}))
    sampling, seen = Sampling(max_new_tokens=30, ignore_eos=True), list[tuple[int, int]]()
    for number in range(30):
        engine.submit(Request(id=number, prompt=(5, number), sampling=sampling))
    while engine.busy:
        engine.step()
        seen.append((engine.scheduler.queued, engine._launches.length.steps))
    assert max(steps for _, steps in seen) == longest
    engine.submit(Request(id=99, prompt=(5, 3), sampling=Sampling(max_new_tokens=40, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert not engine._launches._crowded, "it is alone"


@pytest.mark.usefixtures("one_thread", "eager")
def test_bursts_stay_short_while_a_request_has_one_token_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "CPU_ROOM", 1 << 30)
    engine = Engine(build("vanilla"), **(SMALL | {"burst": 2, "lag": 1}))
    length = engine._launches.length
    sampling = Sampling(max_new_tokens=45, ignore_eos=True)
    plain = [Request(id=number, prompt=(5, number), sampling=sampling) for number in range(2)]
    bound = Request(id=9, prompt=(7,), sampling=Sampling(max_new_tokens=3), constraint=Anything())
    sequences = [engine.submit(request) for request in (*plain, bound)]
    while sequences[2].result is None:
        assert length.steps == 2
        engine.step()
    while engine.busy:
        engine.step()
    assert length.steps > 2
    engine.submit(Request(id=10, prompt=(7,), sampling=Sampling(max_new_tokens=3), constraint=Anything()))
    assert engine.cancel(10)
    assert engine._constrained == 0


@pytest.mark.usefixtures("one_thread", "eager")
def test_pages_of_cached_prefixes_are_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's pool fills with prefixes that nobody holds."""
    monkeypatch.setattr(sizing, "CPU_ROOM", 1 << 30)
    engine = Engine(build("vanilla"), **(SMALL | {"burst": 2, "lag": 1}))
    prompts = [[number % 90, *range(number % 50, number % 50 + 24)] for number in range(40)]
    engine.generate(prompts, max_new_tokens=2)
    (pool,) = engine.scheduler.page_manager.pools
    assert pool.free < 2 * engine.runner.sizes.max_sequences <= pool.available
    assert engine.scheduler.roomy


@pytest.mark.usefixtures("one_thread", "eager")
def test_a_fixed_length_is_fixed_and_pages_are_asked_for_as_early_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "CPU_ROOM", 1 << 30)
    engine = Engine(build("vanilla"), **(SMALL | {"burst": 2, "lag": 1}))
    sizes, alarms = engine.runner.sizes, engine._records.alarm_TS
    engine.submit(Request(id=1, prompt=(5, 3), sampling=Sampling(max_new_tokens=46, ignore_eos=True)))
    rooms = []
    while engine._launches.length.steps < 8:
        engine.step()
        rooms.append(int(alarms[0, 0]) + engine.scheduler.lookahead)
    assert engine.scheduler.lookahead == sizes.lookahead_for(8) == sizes.lookahead + 2 * 6
    assert {room % 4 for room in rooms if room < 48} <= {0}, "always as many entries as pages hold"
    engine.fix_bursts()
    assert engine.scheduler.lookahead == sizes.lookahead
    while engine.busy:
        engine.step()
        assert engine._launches.length.steps == 2
