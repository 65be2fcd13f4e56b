"""Passes of a routed model's decode steps follow how deep its tokens really go."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fathomlm.decode.full import generate
from fathomlm.engine import core_passes
from fathomlm.engine.core_passes import CorePasses, spread
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import SamplingVariant
from fathomlm.engine.sizing import followed_passes
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from model.route.small import model_of, routed

SMALL = {"page_size": 4, "batch_size": 3, "prefill_chunk": 8, "max_length": 64}
PROMPTS = [[3, 14, 15], [12, 55], [35, 9, 29, 32], [38], [46, 26, 43]]


def following(model: FathomForCausalLM, **options: Any) -> Engine:
    """An engine whose steps follow, as on a GPU."""
    engine = Engine(model, **SMALL, **options)
    engine.runner.core_passes = followed_passes(model.plan, engine.options)
    return engine


def test_passes_are_spread_evenly_over_turns() -> None:
    assert [spread(passes, 4) for passes in (4, 5, 6, 7)] == [(1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 2)]
    assert spread(5, 2) == (2, 3)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("depth", [1.0, 1.3, 1.704, 2.0, 2.5, 3.0])
def test_steps_have_as_many_passes_as_tokens_need_on_average(depth: float, turns: int) -> None:
    followed, draw = CorePasses(2.0, turns, 3), random.Random(0)
    for _ in range(300):
        low = int(depth)
        followed.learn(100, sum(low + (draw.random() < depth - low) for _ in range(100)))
    steps = [followed.next() for _ in range(160)]
    assert abs(sum(steps) / 160 / turns - depth) <= 1 / 16 + 0.02
    assert max(steps) - min(steps) <= 1
    assert turns <= min(steps) <= max(steps) <= 3 * turns
    assert (followed.steps, followed.passes) == (160, sum(steps))


def test_noise_around_the_trained_depth_changes_nothing() -> None:
    """Every number of passes is captured once on a GPU."""
    followed, draw = CorePasses(2.0, 1, 3), random.Random(0)
    for _ in range(2000):
        followed.learn(32, sum(draw.randint(1, 3) for _ in range(32)))
        assert followed.next() == 2


def test_a_burst_that_is_one_piece_of_work_makes_up_for_the_one_before() -> None:
    followed = CorePasses(1.75, 1, 3)
    bursts = [followed.next(4) for _ in range(40)]
    assert set(bursts) == {1, 2}
    assert sum(bursts) == 70


@pytest.mark.parametrize("wanted", [1.5, 1.75])
def test_single_steps_behind_a_burst_have_whole_numbers_around_what_is_wanted(wanted: float) -> None:
    followed = CorePasses(wanted, 1, 3)
    for steps in (8, 1, 1, 4, 1, 8, 8, 1):
        assert followed.next(steps) in (1, 2)
    assert list(followed.reachable) == [1, 2, 3]


@pytest.mark.usefixtures("one_thread")
def test_all_that_may_come_is_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_passes, "PRIOR", 4)
    engine = following(model_of(routed("expert")), depth_bias=-100.0)
    runner, captured = engine.runner, list[int | None]()

    def capture(variant: SamplingVariant) -> None:
        captured.append(variant.passes)
        runner._graphs[variant] = SimpleNamespace(replay=partial(runner._decode_step, variant))  # type: ignore[assignment]

    monkeypatch.setattr(runner, "_captures", True)
    monkeypatch.setattr(runner, "_capture", capture)
    engine.generate(PROMPTS[:1], max_new_tokens=1)
    assert captured == [1, 2, 3]
    engine.generate(PROMPTS, max_new_tokens=24)
    assert captured == [1, 2, 3], "steps have one pass by now, and nobody waited for it"
    assert runner.core_passes is not None
    assert runner.core_passes.wanted == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("router", "bias", "passes"), [("expert", -100.0, 1), ("expert", 100.0, 3), ("token", 100.0, 3)])
@pytest.mark.parametrize("burst", [1, 4])
def test_an_engine_follows_and_says_the_same(
    router: str, bias: float, passes: int, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_passes, "PRIOR", 4)
    monkeypatch.setattr(core_passes, "WINDOW", 16)
    model = model_of(routed(router))
    wanted = generate(model, PROMPTS, max_new_tokens=24, control=DepthControl(bias=bias))
    engine = following(model, depth_bias=bias, burst=burst, lag=burst - 1 and 1)
    run, variants = engine.runner.program.decode_step, []
    monkeypatch.setattr(engine.runner.program, "decode_step", lambda variant: (variants.append(variant), run(variant)))
    found = engine.generate(PROMPTS, max_new_tokens=24)
    assert [(result.tokens, result.depths) for result in found] == [(result.tokens, result.depths) for result in wanted]
    assert (variants[0].passes, variants[-1].passes) == (2, passes)
    again = engine.generate(PROMPTS, max_new_tokens=24)
    assert [result.tokens for result in again] == [result.tokens for result in wanted]


def test_passes_that_are_given_or_forced_stay() -> None:
    model, forced = model_of(routed("expert")), (1.0, 0.5, 0.1)
    assert followed_passes(model.plan, EngineOptions()) is not None
    assert followed_passes(model.plan, EngineOptions(cores=2)) is None
    assert followed_passes(model.plan, EngineOptions(forced_depths=forced)) is None
    assert Engine(model, forced_depths=forced, **SMALL).runner.program.cores == (1, 2, 2)
    assert Engine(model, **SMALL).runner.core_passes is None, "on a CPU rows of nobody cost nothing"
