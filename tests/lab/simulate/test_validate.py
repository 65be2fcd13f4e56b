"""Predicted throughput is the engine's. On a clock that tests move, always; on a real one within 15 %, in the slow tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.exit_models import build
from fathomlm.decode.exiting import Exiting
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.engine.programs.base import FLAGS, VALID
from fathomlm.errors import OptionError
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload, WorkloadRequest
from fathomlm.lab.simulate.measured import MeasuredShape, _fit, calibrate, measure_loop, measure_plain, replay
from fathomlm.lab.simulate.validate import validate
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "max_length": 96, "memory": 10**7, "prefix_caching": False}
KINDS = ("whole", "routed", "exits", "one block")


def engine_of(kind: str, **fields: Any) -> TimedEngine:
    if kind == "whole":
        return TimedEngine(build("vanilla"), **(SMALL | fields))
    if kind == "routed":
        return TimedEngine(model_of(routed()), forced_depths=(1.0, 0.6, 0.3), **(SMALL | fields))
    model = build("vanilla" if kind == "exits" else "lora")
    leaving = Exiting(mode="parallel", exit_layers=(model.plan.unrolled_layers // 2,), max_stack=4)
    return TimedEngine(model, exiting=leaving, forced_exits=0.6, **(SMALL | fields))


def workload(vocab: int, texts: int) -> Workload:
    draw = random.Random(0)
    asked = (
        WorkloadRequest(tuple(draw.choices(range(vocab), k=draw.choice((1, 4, 9)))), draw.randrange(4, 16))
        for _ in range(texts)
    )
    return Workload("test", 0, "together", None, tuple(asked))


class Clock:
    """Stands still but for what is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clocked(kind: str, **fields: Any) -> TimedEngine:
    """An engine whose layers, scores, plans and tokens take just as long as is said here."""
    clock = Clock()
    engine = engine_of(kind, clock=clock, **fields)
    layers, scheduler = engine.runner.layers, engine.scheduler

    def slow(holder: Any, name: str, seconds: Callable[..., float]) -> None:
        inner = getattr(holder, name)

        def call(*arguments: Any, **named: Any) -> Any:
            clock.now += seconds(*arguments)
            return inner(*arguments, **named)

        vars(holder)[name] = call

    slow(layers, "run", lambda x, steps, *_: 1e-3 * len(steps) + 1e-5 * len(x))
    slow(layers, "scores", lambda *_: 2e-3)
    slow(scheduler, "schedule", lambda: 0.5e-3)
    records = engine._records
    slow(records, "take", lambda ints, *_: 0.1e-3 * int((records.current(ints) & (ints[:, FLAGS] & VALID != 0)).sum()))
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_is_what_the_engine_takes(kind: str) -> None:
    engine = clocked(kind)
    found = validate(engine, workload(engine.model.architecture.vocab, 16), rounds=1)
    (one,) = found.rounds
    # Depths are other draws of the same parts, which changes a little; all else is what was measured.
    assert found.ratio == pytest.approx(1.0, abs=0.01 if kind == "whole" else 0.08)
    assert one.predicted.decode_steps == pytest.approx(one.decode_steps, rel=0.08)
    assert one.predicted.tokens == one.measured.tokens
    record = found.record()
    assert record["depth"].startswith("forced")
    assert sum(record["stages"].values()) == pytest.approx(1.0)


def test_what_was_measured_is_what_things_took() -> None:
    engine = clocked("routed")
    costs = calibrate(engine, workload(engine.model.architecture.vocab, 20))
    plan = engine.model.plan
    outer = sum(step.part != "core" for step in plan)
    assert costs.curve("core").at(4) == pytest.approx(plan.core_layers + 0.04)
    assert costs.curve("turn").at(4) == pytest.approx(outer + 0.08 + 2.0)
    assert costs.host.step == pytest.approx(0.5)
    assert costs.host.token == pytest.approx(0.1)
    assert (costs.host.placement, costs.padded, costs.overlapped) == (pytest.approx(0.0, abs=1e-6), True, False)
    assert costs.chunk > 0


@pytest.mark.parametrize("kind", ["whole", "routed"])
def test_whole_decode_steps_are_replayed_where_passes_cannot_be_told_apart(kind: str) -> None:
    engine = clocked(kind)
    vocab = engine.model.architecture.vocab
    costs = calibrate(engine, workload(vocab, 10), captured=True)
    apart = calibrate(engine, workload(vocab, 10))
    passes = engine.passes.per_decode_step
    assert costs.decode_step == pytest.approx(sum(apart.curve(one).at(4) * many for one, many in passes.items()), rel=0.15)
    for name in ("step", "token", "placement"):
        assert getattr(costs.host, name) == pytest.approx(getattr(apart.host, name), abs=1e-6)
    assert not engine.busy
    assert all(pool.used == 0 for pool in engine.scheduler.page_manager.pools)
    assert engine.scheduler.lookahead == engine.runner.sizes.lookahead
    assert replay(engine, 10) == pytest.approx(costs.decode_step, rel=0.15)


def test_a_replay_where_the_host_is_behind_leaves_the_engine_as_it_was() -> None:
    engine = clocked("whole", burst=3, lag=1, max_length=120)
    before = engine.generate([[5, 9], [7]], max_new_tokens=9)
    assert replay(engine, 10) == pytest.approx(engine.model.plan.unrolled_layers + 0.04 + 2.0)
    assert not engine.busy
    after = engine.generate([[5, 9], [7]], max_new_tokens=9)
    assert [one.tokens for one in after] == [one.tokens for one in before]


def test_fits_have_no_factor_below_nothing() -> None:
    known = [[1.0, float(x)] for x in range(8)]
    assert _fit(known, [3.0 + 2.0 * x for _, x in known]) == pytest.approx([3.0, 2.0])
    assert _fit(known, [3.0 - 0.1 * x for _, x in known])[1] == 0.0
    assert _fit([], []) == [0.0, 0.0]


TINY = Architecture(family="llama", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=96)


def test_a_timetable_of_a_looped_model() -> None:
    where: dict[str, Any] = {"relaxation": None, "dtype": torch.float32, "device": torch.device("cpu")}
    shape = MeasuredShape(architecture=TINY, plan=DepthPlan.build("cycle", 2, 2), **where)
    assert shape.plain().plan.unrolled_layers == 2
    plain, loop = measure_plain(shape, (1, 2), 8), measure_loop(shape, (1, 2), 8)
    assert [rows for rows, _ in plain.curve("step").points] == [rows for rows, _ in loop.curve("core").points] == [1, 2]
    assert min(plain.curve("step").at(2), loop.curve("core").at(2), loop.curve("turn").at(2)) > 0
    assert loop.curve("both").at(1) == loop.curve("core").at(1) + loop.curve("turn").at(1)
    assert (plain.padded, plain.decode_step, loop.decode_step) == (True, None, None)
    assert loop.host.step + loop.host.token > 0
    apart = measure_loop(shape, (2,), 8, captured=True)  # as on a GPU: two decode steps tell the passes apart
    assert set(apart.passes) == set(loop.passes)
    assert apart.curve("both").at(2) > 0
    with pytest.raises(OptionError, match="requires a looped model"):
        MeasuredShape(architecture=TINY, plan=DepthPlan.vanilla(2), **where).routed()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_within_fifteen_percent_on_a_real_clock(kind: str) -> None:
    """Processor time, because others may be using the machine."""
    engine = engine_of(kind, clock=time.process_time)
    found = validate(engine, workload(engine.model.architecture.vocab, 50), rounds=9)
    assert found.ratio == pytest.approx(1.0, abs=0.15), found.record()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_within_fifteen_percent_on_a_gpu(kind: str) -> None:
    """Recorded decode_steps, and a host that runs behind."""
    shape = Architecture(
        family="llama", layers=12, hidden=512, intermediate=1024, heads=8, kv_heads=4, head_dim=64, vocab=8192, context=1024
    )
    plan = DepthPlan.build("cycle", 2, 12) if kind == "exits" else DepthPlan.vanilla(12)
    if kind == "routed":
        plan = DepthPlan.build("middle-cycle", 2, 12).with_routing(build_routing("expert", 2))
    model = random_model(shape, plan, dtype=torch.bfloat16, device=torch.device("cuda"))
    fields: dict[str, Any] = {"routed": {"forced_depths": (1.0, 0.5)}, "exits": {"forced_exits": 0.6}}.get(kind, {})
    leaving = Exiting(mode="parallel", exit_layers=(6,), max_stack=8) if kind == "exits" else None
    engine = TimedEngine(model, batch_size=32, max_length=640, memory=2**31, exiting=leaving, prefix_caching=False, **fields)
    draw = random.Random(0)
    asked = (WorkloadRequest((draw.randrange(8192),), draw.randrange(120, 400)) for _ in range(300))
    found = validate(engine, Workload("test", 0, "together", None, tuple(asked)), rounds=3)
    assert found.ratio == pytest.approx(1.0, abs=0.15), found.record()
