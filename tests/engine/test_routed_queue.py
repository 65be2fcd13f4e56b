"""The Triton queue leaves every slot as the plain torch one does, on a GPU or by Triton's interpreter.

Slots are in random stages, with random waiting times, entries and room, some of them full; both queues answer the same
questions one after the other, as a decode step asks them, and everything that means something is compared in between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.engine.batch_routers import BatchRouters
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import ProgramContext
from fathomlm.engine.programs.routed_queue import AHEAD_SLOTS, RoutedQueue, TorchQueue, TritonQueue
from fathomlm.engine.runner import Runner
from model.route.small import model_of, routed
from with_triton import GPU, WITH_TRITON

pytestmark = WITH_TRITON
CASES: dict[str, dict[str, Any]] = {
    "router": {},
    "shared entries": {"kv": "share"},
    "no ends": {"loop": "cycle"},
    "tanh": {"router": "expert, tanh"},
    "identity": {"router": "expert, identity"},
    "interpolate": {"router": "expert, interpolate"},
    "random": {"router": "expert, random"},
    "auxiliary router": {"router": "expert, aux router"},
    "forced": {"forced": True},
}
ROWS, SLOTS = 4, 9


def case(name: str) -> tuple[Runner, Any]:
    options = dict(CASES[name])
    forced = options.pop("forced", False)
    plan = routed(options.pop("router", "expert"), **options)
    assert plan.routing is not None
    model = model_of(plan)
    decoder = model.decoder.cuda() if GPU else model.decoder
    depths = plan.routing.capacity if forced else None
    sizes = EngineOptions(
        batch_size=ROWS,
        max_sequences=SLOTS,
        page_size=4,
        max_length=40,
        fuse=True,
        compile=False,
        capture=False,
        forced_depths=depths,
    )
    return Runner(decoder, sizes), plan


def queues(runner: Runner, ahead: bool) -> tuple[RoutedQueue, RoutedQueue, ProgramContext]:
    program: Any = runner.program
    routers: BatchRouters = program.routers
    fast = TritonQueue(program.parts, routers, ahead_slots=0 if ahead else AHEAD_SLOTS)
    return TorchQueue(program.parts, routers), fast, program.parts


def scatter(parts: ProgramContext, queue: RoutedQueue, plan: Any, seed: int) -> None:
    """Slots in all stages; tables and counts that are far enough from each other to tell wrong ones."""
    s, draw = parts.state, torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw).to(s.device)

    many = s.slots
    s.numbers_SC[:many] = whole(0, 30, many, s.numbers_SC.shape[1])
    s.stage_S[:many] = whole(-1, plan.recursions + 2, many)
    s.since_S[:many] = whole(0, 6, many)
    s.max_depth_S[:many] = whole(1, plan.recursions + 1, many)
    s.entries_ST[:many] = whole(0, 36, *s.entries_ST[:many].shape)
    s.capacity_ST[:many] = s.entries_ST[:many] + whole(0, 3, *s.entries_ST[:many].shape)
    s.tables_STP.copy_(whole(0, 1000, *s.tables_STP.shape))
    s.x_SM[:many] = torch.randn(many, s.x_SM.shape[1], generator=draw).to(s.device)
    s.clock.fill_(100)
    queue.slots.gates_SR[:many] = torch.randn(many, plan.recursions, generator=draw).to(s.device)
    queue.slots.depth_S[:many] = whole(0, 4, many)


def snapshot(parts: ProgramContext, queue: RoutedQueue) -> list[Tensor]:
    s = parts.state
    return [t[: s.slots].clone() for t in (s.numbers_SC, s.entries_ST, s.x_SM, queue.slots.gates_SR, queue.slots.depth_S)]


def put_back(parts: ProgramContext, queue: RoutedQueue, kept: list[Tensor]) -> None:
    s = parts.state
    for tensor, old in zip(
        (s.numbers_SC, s.entries_ST, s.x_SM, queue.slots.gates_SR, queue.slots.depth_S), kept, strict=True
    ):
        tensor[: s.slots] = old
    s.clock.fill_(100)


def compare(slow: Any, fast: Any, fields: tuple[str, ...]) -> None:
    for field in fields:
        assert torch.equal(getattr(slow, field), getattr(fast, field)), field
    live, a, b = slow.live_N, slow.attention, fast.attention
    assert torch.equal(a.slot_mapping_N, b.slot_mapping_N)
    assert torch.equal(a.lengths_N, b.lengths_N)
    assert torch.equal(a.table_NP[live], b.table_NP[live])


def questions(parts: ProgramContext, queue: RoutedQueue, turn: bool, out_NM: Tensor) -> list[Any]:
    rows = len(out_NM)
    if not turn:
        taken = queue.begin_core(rows)
        queue.end_core(taken, out_NM)
        return [taken]
    taken = queue.begin_turn(rows)
    entering = queue.enter(taken)
    queue.arrive(entering, out_NM)
    return [taken, entering]


@pytest.mark.parametrize(
    ("name", "ahead"), [*((name, False) for name in CASES), ("router", True), ("shared entries", True), ("no ends", True)]
)
@pytest.mark.parametrize("turn", [False, True])
@torch.no_grad()
def test_slots_come_out_alike(name: str, ahead: bool, turn: bool) -> None:
    runner, plan = case(name)
    plain, fast, parts = queues(runner, ahead)
    took = 0
    for seed in range(12):
        scatter(parts, plain, plan, seed)
        before = snapshot(parts, plain)
        put_back(parts, fast, before)
        rows = ROWS if seed % 3 else ROWS // 2  # a pass may have fewer, where few sequences are there
        out_NM = torch.randn(rows, parts.state.x_SM.shape[1], generator=torch.Generator().manual_seed(seed))
        out_NM = out_NM.to(parts.state.device)
        slow_asked = questions(parts, plain, turn, out_NM)
        slow = snapshot(parts, plain)
        put_back(parts, fast, before)
        fast_asked = questions(parts, fast, turn, out_NM)
        quick = snapshot(parts, fast)
        assert int(parts.state.clock) == 101
        compare(slow_asked[0], fast_asked[0], ("rows_N", "recursion_N", "live_N", "positions_N", "x_NM"))
        angles = fast_asked[0].attention.angles
        for got, table in zip(angles, parts.layers.angle_tables(), strict=True):
            assert torch.equal(got, table[fast_asked[0].positions_N])
        if turn:
            compare(slow_asked[1], fast_asked[1], ("tokens_N", "live_N", "positions_N"))
        ran = slow_asked[-1].rows_N[slow_asked[-1].live_N]
        took += len(ran)
        others = torch.ones(parts.state.slots, dtype=torch.bool)
        others[ran.cpu()] = False
        for was, a, b in zip(before, slow, quick, strict=True):
            torch.testing.assert_close(a[ran], b[ran], rtol=1e-5, atol=1e-5)
            if a.dtype == torch.int64:
                assert torch.equal(a, b)
            else:
                assert torch.equal(b[others], was[others]), "nothing else is touched"
    assert took > 12, "rows ran"
