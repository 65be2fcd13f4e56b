"""Three ways to batch, on numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fathomlm.depth import DepthPlan
from fathomlm.depth.cost import count
from fathomlm.depth.presets import preset
from fathomlm.errors import OptionError
from fathomlm.lab.simulate.costs import Costs, HostTimes, TimeCurve
from fathomlm.lab.simulate.devices import Device, LoopDevice, PlainDevice
from fathomlm.lab.simulate.policies import compare, loop_device, run_vanilla
from fathomlm.lab.simulate.simulation import EngineSetup, Simulation, SimulationResult, fit_memory
from fathomlm.lab.simulate.trajectories import Trajectories, Trajectory, draw

LINE = TimeCurve(((1, 2.0), (3, 4.0)))
COSTS = Costs(name="by hand", passes={"step": LINE, "core": LINE, "turn": TimeCurve.flat(0.25), "both": LINE})


def texts(*depths: tuple[int, ...], prompt: int = 1) -> Trajectories:
    return Trajectories(tuple(Trajectory(prompt, one) for one in depths), 2, "file", "by hand")


def run_depth(found: Trajectories, costs: Costs, setting: EngineSetup, device: Device) -> SimulationResult:
    return Simulation(device, setting, costs, found).run()


def run_sequence(found: Trajectories, costs: Costs, setting: EngineSetup) -> SimulationResult:
    return run_depth(found, costs, setting, PlainDevice(setting.max_sequences))


def test_a_batch_waits_for_its_longest_text() -> None:
    found = texts((1,), (1, 1, 1), (1, 1), (1,))
    # Rows 2: the first batch makes one token of two texts and two of one; the second two texts, one of which ends first.
    shrunk = run_vanilla(found, COSTS, 2)
    assert shrunk.ms == (3.0 + 2 * 2.0) + (3.0 + 2.0)
    assert (shrunk.tokens, shrunk.decode_steps, shrunk.batch_filled) == (7, 5, 7 / 10)
    assert run_vanilla(found, COSTS, 2, "pad").ms == 3 * 3.0 + 2 * 3.0
    assert run_vanilla(found, replace(COSTS, padded=True), 3).ms == 3 * 4.0 + 1 * 4.0
    read = replace(COSTS, chunk=1.0, prompt_token=0.5, host=HostTimes(step=0.1, token=0.01, placement=0.001))
    slow = run_vanilla(texts((1,), (1, 1), prompt=5), read, 2)
    assert slow.ms == pytest.approx(3.0 + 2.0 + (1.0 + 8 * 0.5) + 2 * 0.1 + 3 * 0.01 + 2 * 0.001)
    assert sum(slow.shares.values()) == pytest.approx(1.0)


def test_a_text_takes_the_place_of_another_as_soon_as_that_is_over() -> None:
    found = run_sequence(texts((1,), (1, 1, 1), (1, 1), (1,)), COSTS, EngineSetup(max_sequences=2))
    # Two rows until seven tokens are made: 2 + 2 + 2 + 1.
    assert (found.decode_steps, found.tokens, found.ms) == (4, 7, 3 * 3.0 + 2.0)
    assert found.batch_filled == 7 / 8


def test_rows_of_all_depths_share_passes_of_the_block() -> None:
    found = texts((1, 2), (2, 1))
    outcome = run_depth(found, COSTS, EngineSetup(max_sequences=2), loop_device(found, 2))
    # Both texts run three passes, side by side, and a turn behind each.
    assert outcome.filled["core"] == 6
    assert outcome.spent["core"] == 3 * 3.0
    assert outcome.ms == 3 * 3.0 + 3 * 0.25
    # The engine's program needs a turn first, to bring texts in front of the block.
    turned = run_depth(found, COSTS, EngineSetup(max_sequences=2), loop_device(found, 2, cores=(1,)))
    assert (turned.ms, turned.decode_steps) == (3 * 3.0 + 4 * 0.25, 4)
    # With one row they take turns: six passes of one row.
    one = run_depth(found, COSTS, EngineSetup(max_sequences=2), loop_device(found, 1))
    assert (one.spent["core"], one.filled["core"]) == (6 * 2.0, 6)


def test_exact_entries_cost_passes_and_free_ones_do_not() -> None:
    found = draw([(1, 40)] * 12, (1.0, 0.3))
    free = run_depth(found, COSTS, EngineSetup(max_sequences=3), loop_device(found, 3))
    exact = run_depth(found, COSTS, EngineSetup(max_sequences=3), loop_device(found, 3, "exact"))
    work = sum(sum(text.depths) for text in found.sequences)
    assert free.filled["core"] == work
    assert exact.filled["both"] > 1.2 * work  # what left runs on all the same
    assert exact.tokens == free.tokens == found.tokens
    with pytest.raises(OptionError, match="one exit between two loops"):
        loop_device(draw([(1, 4)], (1.0, 0.5, 0.2)), 3, "exact")


def test_full_rows_make_tokens_at_the_rate_of_the_mean_depth() -> None:
    """What the thesis' figures come down to, with a queue that is long."""
    found = draw([(1, 30)] * 400, (1.0, 0.25))
    flat = Costs(
        name="flat", passes={"step": TimeCurve.flat(20.0), "core": TimeCurve.flat(10.0), "turn": TimeCurve.flat(0.0)}
    )
    both = compare(
        found, flat, plain=EngineSetup(max_sequences=8), deep=EngineSetup(max_sequences=8), device=loop_device(found, 8)
    )
    assert both.depth.tokens_per_s == pytest.approx(8 / (0.010 * found.mean_depth), rel=0.02)
    assert both.sequence.tokens_per_s == pytest.approx(8 / 0.020, rel=0.01)
    assert both.delta_seq == pytest.approx(2 / found.mean_depth, rel=0.02)
    assert both.delta_v == pytest.approx(both.delta_seq, rel=0.01)  # all texts are equally long
    record = both.record()
    assert record["delta_seq"] == record["depth"]["tokens_per_s"] / record["sequence"]["tokens_per_s"]


def test_the_host_may_work_beside_the_device() -> None:
    found = texts(*[(1, 1, 1, 1)] * 4)
    host = HostTimes(step=1.0)
    costs = replace(COSTS, host=host)
    alone = run_sequence(found, costs, EngineSetup(max_sequences=2))
    assert alone.ms == pytest.approx(8 * 3.0 + 9 * 1.0)  # a step hears of the decode_step of the step before
    beside = run_sequence(found, replace(costs, overlapped=True), EngineSetup(max_sequences=2, lag=1, lookahead=3))
    assert 8 * 3.0 <= beside.ms < 9 * 3.0 + 3 * 1.0
    slow_host = run_sequence(
        found, replace(costs, overlapped=True, host=HostTimes(step=9.0)), EngineSetup(max_sequences=2, lag=1, lookahead=3)
    )
    assert slow_host.ms > 8 * 9.0


def test_few_pages_put_texts_aside_and_no_page_is_lost() -> None:
    found = draw([(6, 20)] * 10, (1.0, 0.5))
    setting = EngineSetup(max_sequences=4, page_size=4, pool_pages=(14,))
    tight = run_depth(found, COSTS, setting, loop_device(found, 4))
    ample = run_depth(found, COSTS, replace(setting, pool_pages=None), loop_device(found, 4))
    assert tight.preemptions > 0
    assert ample.preemptions == 0
    assert tight.tokens == ample.tokens == found.tokens
    assert tight.ms > ample.ms


def test_recursion_wise_entries_need_fewer_pages() -> None:
    """Tables of deeper recursions fill only as far as tokens go."""
    found = draw([(8, 40)] * 12, (1.0, 0.25))
    pools = EngineSetup(max_sequences=6, page_size=4, tables=(0, 0), pool_pages=(60,))
    own = run_depth(found, COSTS, pools, LoopDevice(6, recursions=2, own=True))
    whole = draw([(8, 40)] * 12, (1.0, 1.0))
    deep = run_depth(whole, COSTS, pools, LoopDevice(6, recursions=2, own=True))
    assert own.preemptions < deep.preemptions


def test_outcomes_without_time() -> None:
    nothing = SimulationResult(
        tokens=0, ms=0.0, decode_steps=0, batch_size=1, max_sequences=1, batch_entries={}, filled={}, spent={}
    )
    assert (nothing.batch_filled, nothing.shares, nothing.tokens_per_s) == (0.0, {}, float("inf"))


def test_what_fits_a_memory() -> None:
    architecture = preset("smollm-135m").architecture
    plan = DepthPlan.build("middle-cycle", 3, architecture.layers, "add")
    cost = count(architecture, plan)
    weights = 2 * (cost.non_embedding_parameters + cost.embedding_parameters)
    a_text = cost.kv_bytes_per_token * 100
    room = fit_memory(architecture, plan, None, memory=weights + 7 * a_text + 5, length=100)
    assert (room.weights, room.kv, room.sequences, room.tables) == (weights, 7 * a_text + 5, 7, (0,))
    assert room.pool_pages == (7 * 100 // 16,)
    with pytest.raises(OptionError, match="holds no sequence of 100 tokens"):
        fit_memory(architecture, plan, None, memory=weights, length=100)
