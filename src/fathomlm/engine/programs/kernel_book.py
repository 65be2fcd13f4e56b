"""`bookkeeping.Book` with one kernel to a question, where Triton is."""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.engine.kv_pages import AttentionMetadata
from fathomlm.engine.programs.base import ProgramContext
from fathomlm.engine.programs.bookkeeping import Entering, Slots, Taken
from fathomlm.engine.routing import BatchRouters
from fathomlm.kernels import routed_rows
from fathomlm.kernels.triton_here import triton

WARPS = 4


class KernelBook:
    def __init__(self, parts: ProgramContext, routers: BatchRouters) -> None:
        self.parts, self.routers = parts, routers
        self.slots = Slots.build(parts, routers)
        s, plan, a = parts.state, parts.plan, parts.layers.architecture
        self._tables_R = torch.tensor(parts.layout.recursion_tables, device=s.device)
        self._angles = parts.layers.angle_tables()
        T, P = s.tables_STP.shape[1:]
        wide = triton.next_power_of_2
        self._common = {"C": s.numbers_SC.stride(0), "T": T, "OWN": plan.kv == "cache"}
        self._coda = any(step.part == "coda" for step in plan)
        self._seen = {
            "P": P, "D": a.head_dim, "PAGE": parts.page_size, "PAGES": wide(P), "WIDE": wide(a.head_dim), "CODA": self._coda,
            "num_warps": WARPS,
        }  # fmt: skip
        self._hidden = {"M": a.hidden, "HIDDEN": wide(a.hidden), "R": plan.recursions}
        self._routing = routers.weights()

    def begin_core(self) -> Taken:
        return self._pick(turn=False)

    def begin_turn(self) -> Taken:
        return self._pick(turn=True)

    def _pick(self, turn: bool) -> Taken:
        s, kept, N = self.parts.state, self.slots, self.parts.batch_size
        rows_N, recursion_N = self._numbers(), self._numbers()
        live_N, x_NM = self._marks(), s.x_SM.new_empty(N, s.x_SM.shape[1])
        positions_N, seen = self._numbers(), self._empty_reach()
        assert seen.angles is not None
        depth_N = recursion_N  # one of the two is asked for
        routed_rows.pick_kernel[(max(s.slots, N),)](
            s.stage_S, s.since_S, s.position_S, s.entries_ST, s.capacity_ST, s.clock, self._tables_R, s.x_SM, kept.depth_S,
            rows_N, recursion_N, live_N, x_NM, depth_N, s.tables_STP, *self._angles,
            positions_N, seen.slots_N, seen.lengths_N, seen.table_NP, *seen.angles, s.spare, N,
            SLOTS=triton.next_power_of_2(s.slots), TURN=turn, **self._common, **self._seen, **self._hidden,
        )  # fmt: skip
        return Taken(rows_N, recursion_N, live_N, positions_N, x_NM, seen)

    def enter(self, taken: Taken) -> Entering:
        s = self.parts.state
        tokens_N, enters_N, positions_N, seen = self._numbers(), self._marks(), self._numbers(), self._empty_reach()
        assert seen.angles is not None
        routed_rows.enter_kernel[(self.parts.batch_size,)](
            s.token_S, s.stage_S, s.position_S, s.entries_ST, s.capacity_ST, taken.rows_N, taken.live_N, tokens_N, enters_N,
            s.tables_STP, *self._angles, positions_N, seen.slots_N, seen.lengths_N, seen.table_NP, *seen.angles, s.spare,
            **self._common, **self._seen,
        )  # fmt: skip
        return Entering(taken.rows_N, tokens_N, enters_N, positions_N, seen)

    def end_core(self, taken: Taken, out_NM: Tensor) -> None:
        self._move(taken.rows_N, taken.recursion_N, taken.live_N, taken.positions_N, out_NM, arrives=False)

    def arrive(self, entering: Entering, x_NM: Tensor) -> None:
        rows_N = entering.rows_N
        self._move(rows_N, rows_N, entering.live_N, entering.positions_N, x_NM, arrives=True)

    def _move(
        self, rows_N: Tensor, recursion_N: Tensor, live_N: Tensor, positions_N: Tensor, out_NM: Tensor, arrives: bool
    ) -> None:
        s, kept, routers, w = self.parts.state, self.slots, self.routers, self._routing
        routing = routers.routing
        choice = "forced" if routers.forced is not None else "random" if routing.random else "router"
        routed_rows.move_kernel[(self.parts.batch_size,)](
            rows_N, recursion_N, live_N, positions_N, out_NM, w.main_RM, w.judge_RM, w.selective_R, w.least_R,
            s.x_SM, kept.said_SR, kept.depth_S, s.entries_ST, self._tables_R, s.stage_S, s.since_S, s.token_S,
            s.epoch_S, s.max_depth_S, s.clock, routing.alpha, routers.bias,
            SAID=triton.next_power_of_2(routing.recursions), ARRIVES=arrives, SCORE=routing.score,
            CHANGE=routing.update != "add", CHOICE=choice, **self._common, **self._hidden, num_warps=WARPS,
        )  # fmt: skip

    def _numbers(self) -> Tensor:
        return torch.empty(self.parts.batch_size, dtype=torch.int64, device=self.parts.state.device)

    def _marks(self) -> Tensor:
        return torch.empty(self.parts.batch_size, dtype=torch.bool, device=self.parts.state.device)

    def _empty_reach(self) -> AttentionMetadata:
        s, N, D = self.parts.state, self.parts.batch_size, self._seen["D"]
        table_NP = torch.empty(N, s.tables_STP.shape[2], dtype=torch.int32, device=s.device)
        lengths_N = torch.empty(N, dtype=torch.int32, device=s.device)
        angles = (s.x_SM.new_empty(N, D), s.x_SM.new_empty(N, D))
        return AttentionMetadata(self._numbers(), table_NP, lengths_N, angles=angles)
