"""Measuring: records add up on a clock of the test's own, and the clock changes no token."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.exit_models import build, exiting, mixing_threshold
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.lab.bench.depth import DepthChoice
from fathomlm.lab.bench.measure import LatencySummary, Measurement, Timing, measure, stage_shares
from fathomlm.lab.bench.models import plain_model, random_model, with_context
from fathomlm.lab.bench.play import RequestTimes, WorkloadRun, play, warm_up
from fathomlm.lab.bench.timed import STAGES, StageClock, TimedEngine
from fathomlm.lab.bench.workload import Workload, WorkloadRequest, build_workload
from model.route.small import LLAMA, VOCAB, model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}


class Clock:
    """Stands still but for what is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SteppedEngine(TimedEngine):
    """Every step takes a second."""

    def step(self) -> None:
        self.clock.sleep(1.0)  # type: ignore[attr-defined]
        super().step()


def asked(*requests: WorkloadRequest, **fields: Any) -> Workload:
    return replace(Workload("test", 0, "together", None, requests), **fields)


# Arithmetic.


def test_times_are_summed_up_in_milliseconds() -> None:
    assert LatencySummary.of([]) is None
    assert LatencySummary.of([0.004]) == LatencySummary(p50=4.0, p99=4.0, mean=4.0)
    assert LatencySummary.of([0.002, 0.001, 0.006]) == LatencySummary(
        p50=2.0, p99=pytest.approx(5.92), mean=pytest.approx(3.0)
    )


def test_inner_stages_are_not_counted_twice() -> None:
    clock = Clock()
    stages = StageClock(clock, STAGES)
    with stages("collecting"):
        clock.sleep(1)
        with stages("waiting"):
            clock.sleep(5)
        clock.sleep(2)
    with suppress(ValueError), stages("scheduling"):
        clock.sleep(4)
        raise ValueError("what fails takes time too")
    assert stages.seconds == dict.fromkeys(STAGES, 0.0) | {"collecting": 3.0, "waiting": 5.0, "scheduling": 4.0}
    played = WorkloadRun(begun=0.0, ended=20.0, idle=6.0)
    shares = stage_shares(played, dict(stages.seconds))
    assert shares["idle"] == 0.3
    assert shares["waiting"] == 0.25
    assert shares["other"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1)


def test_timing_of_what_was_heard() -> None:
    first = RequestTimes(4, 0.0, [1.0, 1.5, 3.0], reason="length")
    second = RequestTimes(2, 0.5, [2.0], reason="error", error="no numbers")
    third = RequestTimes(1, 0.5, reason="cancelled")
    found = Timing.of(WorkloadRun(begun=0.0, requests=[first, second, third], ended=5.0, interrupted=True))
    assert (found.requests, found.finished, found.failed, found.error) == (3, 1, 1, "no numbers")
    assert (found.prompt_tokens, found.tokens, found.seconds) == (7, 4, 3.0)
    assert found.tokens_per_s == pytest.approx(4 / 3)
    assert found.time_to_first_token_ms == LatencySummary.of([1.0, 1.5])
    assert found.inter_token_ms == LatencySummary.of([0.5, 1.5])
    assert found.interrupted


def test_the_record_adds_up_on_a_clock_of_its_own() -> None:
    clock = Clock()
    engine = SteppedEngine(build("vanilla"), clock=clock, **(SMALL | {"batch_size": 2}))
    workload = asked(WorkloadRequest((5,), 3), WorkloadRequest((9,), 3, at=10.0), arrivals="poisson", rate=0.1)
    found = measure(engine, workload, speed=1e6, sleep=clock.sleep)
    # A step hears the tick of the step before: tokens after 2, 3 and 4 seconds, then nothing until the tenth.
    assert found.timing.time_to_first_token_ms == LatencySummary(p50=2000, p99=2000, mean=2000)
    assert found.timing.inter_token_ms == LatencySummary(p50=1000, p99=1000, mean=1000)
    assert (found.timing.seconds, found.timing.tokens_per_s) == (14.0, 6 / 14)
    assert (found.work.decode_steps, found.work.batch_filled) == (6, 0.5)
    total = clock.now
    assert found.work.stages["idle"] == pytest.approx(6 / total)
    assert found.work.stages["other"] == pytest.approx(1 - 6 / total)
    assert found.work.ms_per_decode_step == pytest.approx(1e3 * (total - 6) / 6)
    assert found.floor.ms_per_decode_step == pytest.approx(1e3 * found.floor.bytes_per_decode_step / 1e6)
    assert found.floor.share == pytest.approx(found.floor.ms_per_decode_step / found.work.ms_per_decode_step)
    assert (found.depth.mean, found.depth.full, found.depth.unit, found.depth.exit_rate) == (6, 6, "layers", 0)


def test_one_by_one_a_request_comes_when_the_last_is_done() -> None:
    clock = Clock()
    engine = SteppedEngine(build("vanilla"), clock=clock, **(SMALL | {"batch_size": 2}))
    played = play(engine, asked(*(WorkloadRequest((5,), 2) for _ in range(3)), arrivals="one by one"), sleep=clock.sleep)
    ends = [one.times[-1] for one in played.requests]
    assert [one.arrival for one in played.requests] == [0.0, *ends[:-1]]
    assert len({one.times[0] - one.arrival for one in played.requests}) == 1


def test_a_queue_that_holds_few_makes_requests_wait_and_counts_the_wait() -> None:
    clock = Clock()
    engine = SteppedEngine(build("vanilla"), clock=clock, max_queue=2, **(SMALL | {"batch_size": 1}))
    played = play(engine, asked(*(WorkloadRequest((5,), 2) for _ in range(6))), sleep=clock.sleep)
    assert [one.reason for one in played.requests] == ["length"] * 6
    assert {one.arrival for one in played.requests} == {0.0}
    assert played.requests[-1].times[0] > 6


# The engine under it.


def engines(kind: str) -> tuple[Engine, TimedEngine]:
    model = model_of(routed()) if kind == "routed" else build("vanilla")
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla")) if kind == "exits" else None
    return Engine(model, exiting=setting, **SMALL), TimedEngine(model, exiting=setting, **SMALL)


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_a_clock_changes_no_token(kind: str) -> None:
    plain, timed = engines(kind)
    prompts = [[7, 3, 19, 4, 4, 50, 2], [12], [33, 8]]
    expected = plain.generate(prompts, max_new_tokens=9)
    assert [one.tokens for one in timed.generate(prompts, max_new_tokens=9)] == [one.tokens for one in expected]
    assert timed.totals.decode_steps == timed.passes.decode_steps == plain.totals.decode_steps
    assert min(timed.stages.seconds[stage] for stage in STAGES) > 0


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_rows_filled_are_those_that_layers_ran(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = engines(kind)
    layers, ran = engine.runner.layers, {"core": 0, "all": 0, "offered": 0}
    inner = layers.run

    def run(x: torch.Tensor, steps: Any, reach: Any, *rest: Any, **named: Any) -> torch.Tensor:
        filled = int((reach.lengths_N > 0).sum())
        part = steps[0].part if steps else "none"
        ran["core"] += filled if kind == "routed" and part == "core" else 0
        ran["all"] += filled
        ran["offered"] += len(x)
        return inner(x, steps, reach, *rest, **named)

    monkeypatch.setattr(layers, "run", run)
    found = measure(engine, asked(*(WorkloadRequest((token,), 7) for token in range(1, 8))), speed=1e9)
    passes = engine.passes
    if kind == "routed":
        assert passes.filled["core"] == ran["core"]
        assert found.work.batch_filled_by_pass["core"] == ran["core"] / (
            passes.decode_steps * passes.per_decode_step["core"] * 3
        )
    else:
        assert passes.filled.total() == ran["all"]
        batch_entries = (
            passes.decode_steps * sum(passes.per_decode_step.values()) * engine.options.batch_size
        )  # passes that nobody runs are left out
        assert found.work.batch_filled == ran["all"] / batch_entries
        assert ran["offered"] <= batch_entries
    assert 0.3 < found.work.batch_filled <= 1


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_warming_up_leaves_nothing_behind(kind: str) -> None:
    _, engine = engines(kind)
    workload = build_workload("64-256", VOCAB, requests=4).shortened(4, 6)
    workload = replace(workload, requests=tuple(WorkloadRequest(one.prompt[:9], one.new) for one in workload.requests))
    warm_up(engine, workload)
    assert (engine.totals.decode_steps, engine.passes.decode_steps, engine.most_kv_bytes) == (0, 0, 0)
    assert set(engine.stages.seconds.values()) == {0.0}
    found = measure(engine, workload, speed=1e9)
    assert found.work.prefix_hits == 0
    assert (found.timing.tokens, found.timing.finished) == (24, 4)
    assert 0 < found.memory.kv_most <= found.memory.kv


def test_ctrl_c_keeps_what_was_heard_and_cancels_the_rest() -> None:
    clock = Clock()
    engine = SteppedEngine(build("vanilla"), clock=clock, **SMALL)
    told: list[tuple[int, int]] = []

    def interrupt(done: int, total: int) -> None:
        told.append((done, total))
        if done >= 9:
            raise KeyboardInterrupt

    found = measure(engine, asked(*(WorkloadRequest((5,), 8) for _ in range(6))), speed=1e9, on_progress=interrupt)
    assert found.timing.interrupted
    assert found.timing.tokens == told[-1][0] == 9
    assert told[-1][1] == 48
    assert (found.timing.requests, found.timing.finished) == (6, 0)
    while engine.busy:
        engine.step()
    assert engine.counters().running == engine.counters().queued == 0


# Depth.


def forced(model: Any, requests: int = 32, **fields: Any) -> Measurement:
    setting = fields.pop("exiting", None)
    workload = asked(*(WorkloadRequest((number % VOCAB,), 32) for number in range(requests)))
    engine = TimedEngine(model, exiting=setting, batch_size=16, max_length=workload.longest, memory=2**24, **fields)
    return measure(engine, workload, speed=1e9, depth=DepthChoice(source="forced", label="forced: test"))


def test_forced_depths_come_out_as_asked_for() -> None:
    parts = (1.0, 0.7, 0.25)
    found = forced(model_of(routed()), forced_depths=parts)
    for depth, part in enumerate(parts, start=1):
        error = 4 * (part * (1 - part) / found.timing.tokens) ** 0.5
        assert found.depth.ran[depth] == pytest.approx(part, abs=error + 1e-9)
    assert found.depth.mean == pytest.approx(sum(found.depth.ran.values()))
    assert found.depth.exit_rate == pytest.approx(1 - found.depth.ran[3])
    assert (found.depth.source, found.depth.unit, found.depth.full) == ("forced", "recursions", 3)


def test_forced_exits_come_out_as_asked_for() -> None:
    found = forced(build("vanilla"), exiting=exiting("vanilla", "parallel"), forced_exits=0.8)
    error = 4 * (0.8 * 0.2 / found.timing.tokens) ** 0.5
    assert found.depth.exit_rate == pytest.approx(0.8, abs=error)
    assert found.depth.mean == pytest.approx(6 - 3 * found.depth.exit_rate)
    assert set(found.depth.ran) == {3, 6}


def test_forced_depths_are_called_that() -> None:
    with pytest.raises(AssertionError):
        DepthChoice(source="forced", label="as deep as they like")
    with pytest.raises(AssertionError):
        DepthChoice(source="router", label="forced")


# Models.


def test_random_models_of_any_plan_run() -> None:
    where: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    one, again, other = (random_model(LLAMA, routed(), seed=seed, **where) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.decoder.embed.weight, other.decoder.embed.weight)
    assert all(parameter.isfinite().all() for parameter in one.parameters())
    plain = plain_model(one)
    assert (plain.plan.recursions, plain.plan.unrolled_layers) == (1, one.plan.unrolled_layers)
    assert plain.plan.unique_layers == one.plan.unrolled_layers
    assert with_context(LLAMA, 500).context == 500
    assert with_context(LLAMA, 10) is LLAMA


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_ample_memory_puts_nobody_aside(kind: str) -> None:
    plain, _ = engines(kind)
    model, workload = plain.model, asked(*(WorkloadRequest((number,), 16) for number in range(8)))
    options = EngineOptions(batch_size=4, page_size=4, max_length=workload.longest)
    setting = exiting("vanilla", "parallel") if kind == "exits" else None
    ample = ample_memory(model.decoder, options, workload.longest, setting)
    engine = TimedEngine(model, replace(options, memory=ample), exiting=setting)
    assert measure(engine, workload, speed=1e9).work.preemptions == 0
    scarce = TimedEngine(model, replace(options, memory=ample // 4), exiting=setting)
    assert measure(scarce, workload, speed=1e9).work.preemptions > 0


def test_ample_memory_for_one_text_takes_the_longest() -> None:
    """Every pool has room for a text whose tokens all go as deep as they can: memory is shared out by trained depths."""
    architecture = replace(LLAMA, layers=8)
    plan = DepthPlan.build("middle-cycle", 3, 8).with_routing(build_routing("expert", 3))
    model = random_model(architecture, plan, dtype=torch.float32, device=torch.device("cpu"))
    workload = asked(WorkloadRequest((1, 2, 3), 60))
    options = EngineOptions(batch_size=1, max_sequences=1, page_size=4, max_length=workload.longest)
    engine = TimedEngine(model, replace(options, memory=ample_memory(model.decoder, options, workload.longest)))
    assert measure(engine, workload, speed=1e9).work.preemptions == 0
