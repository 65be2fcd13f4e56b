"""The queue of a routed model's tokens on the device: who runs the next pass, what they see, and where they go from there.

`TorchQueue` is the meaning, for every router; compiled it is a few kernels for each call. `TritonQueue` has one for each,
for the routers that models have by default (expert-choice, linear), since on a GPU a pass of the block is so short that a
dozen launches in front of it count.

Shapes: N rows, P pages of a table, M hidden width, D head width, R recursions, S slots.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fathomlm.engine.batch_routers import BatchRouters
from fathomlm.engine.device_state import ENTER, IDLE
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import ProgramContext, pick
from fathomlm.kernels import routed_rows
from fathomlm.kernels.routed_rows import CORE
from fathomlm.kernels.triton_here import triton

WARPS = 4
AHEAD_SLOTS = 256
"""From more slots on, who waits is looked up by a kernel of its own."""
BLOCK = 128
"""Slots of one of its programs."""


class PickedRows(NamedTuple):
    """Rows of a batch."""

    rows_N: Tensor
    """Their slots; the spare one where a row stands for nothing."""
    recursion_N: Tensor
    """Of the block; the depth that a token reached, where it is about to be chosen."""
    live_N: Tensor
    """Rows that run. In a turn, those that are through; others have yet to enter."""
    positions_N: Tensor
    x_NM: Tensor
    """A copy of the stream that the pass may overwrite."""
    attention: AttentionMetadata


class Entering(NamedTuple):
    """Rows in front of the first layer."""

    rows_N: Tensor
    tokens_N: Tensor
    live_N: Tensor
    positions_N: Tensor
    attention: AttentionMetadata


class RoutedSlots(NamedTuple):
    """What stays in a slot between passes, beside its numbers and the stream."""

    gates_SR: Tensor
    """What the router said."""
    first_SM: Tensor
    """The stream that entered the core, which token-choice adds; empty where nobody asks."""
    depth_S: Tensor
    """Recursions run so far."""

    @staticmethod
    def build(parts: ProgramContext, routers: BatchRouters) -> RoutedSlots:
        s = parts.state
        gates_SR = torch.zeros(s.slots + 1, parts.plan.recursions, device=s.device)
        first_SM = torch.zeros_like(s.x_SM) if routers.keeps_first else s.x_SM[:0]
        return RoutedSlots(gates_SR, first_SM, torch.zeros(s.slots + 1, dtype=torch.int64, device=s.device))


class RoutedQueue(Protocol):
    slots: RoutedSlots

    def begin_core(self, rows: int) -> PickedRows:
        """So many rows, which have waited longest for the block."""
        ...

    def end_core(self, picked: PickedRows, out_NM: Tensor) -> None:
        """The stream behind the block, as the router weighs it; and whether it goes on."""
        ...

    def begin_turn(self, rows: int) -> PickedRows:
        """Rows that are through, and rows whose token has yet to enter and has room to."""
        ...

    def enter(self, picked: PickedRows) -> Entering:
        """After the choice: the next token of each row, if there is one and it has room."""
        ...

    def arrive(self, entering: Entering, x_NM: Tensor) -> None:
        """The stream in front of the core: who goes how deep is asked for the first time."""
        ...


class RecursionPlanes(NamedTuple):
    """hybrid: from one recursion's entries to the next one's, which lie in planes further on; nowhere else."""

    pages: int
    """What is added to page numbers for each recursion; 0 where all look at the same planes."""
    planes: int
    """How many page numbers may lead through (`AttentionMetadata.planes`)."""

    @staticmethod
    def of(parts: ProgramContext) -> RecursionPlanes:
        plan = parts.plan
        if plan.kv != "hybrid" or plan.recursions == 1:
            return RecursionPlanes(0, 1)
        apart = parts.layout.shift(plan.recursion_steps(0), plan.recursion_steps(1))
        assert apart, "recursions of one block have their planes in one order"
        return RecursionPlanes(apart * parts.layers.pages.stride(0), 1 + (plan.recursions - 1) * apart)

    def offset(self, recursion_N: Tensor) -> Tensor | None:
        return recursion_N * self.pages if self.pages else None


def build_queue(parts: ProgramContext, routers: BatchRouters) -> RoutedQueue:
    s, a = parts.state, parts.layers.architecture
    whole = a.rotary_dim == a.head_dim and parts.layers.fused and parts.plan.kv != "hybrid"
    if triton is not None and s.device.type == "cuda" and routers.linear and whole:
        return TritonQueue(parts, routers)
    return TorchQueue(parts, routers)


class TorchQueue:
    def __init__(self, parts: ProgramContext, routers: BatchRouters) -> None:
        self.parts, self.routers = parts, routers
        s, plan = parts.state, parts.plan
        self.slots = RoutedSlots.build(parts, routers)
        self.turn = CORE + plan.recursions
        self._coda = any(step.part == "coda" for step in plan)
        self._tables_R = torch.tensor(parts.layout.recursion_tables, device=s.device)
        self._own = plan.kv == "cache"
        self._planes = RecursionPlanes.of(parts)
        self._begin_core, self._end_core = parts.small(self._begin_core_plain), parts.small(self._end_core_plain)
        self._begin_turn, self._enter = parts.small(self._begin_turn_plain), parts.small(self._enter_plain)
        self._arrive = parts.small(self._arrive_plain)

    def begin_core(self, rows: int) -> PickedRows:
        self.parts.state.clock.add_(1)
        rows_N, recursion_N, live_N, positions_N, x_NM, *found = self._begin_core(rows)
        seen = AttentionMetadata(*found, planes=self._planes.planes, slots_N=rows_N)
        return PickedRows(rows_N, recursion_N, live_N, positions_N, x_NM, seen)

    def end_core(self, picked: PickedRows, out_NM: Tensor) -> None:
        self._end_core(*picked[:4], out_NM)

    def begin_turn(self, rows: int) -> PickedRows:
        self.parts.state.clock.add_(1)
        rows_N, recursion_N, live_N, positions_N, x_NM, *found = self._begin_turn(rows)
        return PickedRows(rows_N, recursion_N, live_N, positions_N, x_NM, AttentionMetadata(*found, slots_N=rows_N))

    def enter(self, picked: PickedRows) -> Entering:
        tokens_N, enters_N, positions_N, *found = self._enter(picked.rows_N, picked.live_N)
        return Entering(picked.rows_N, tokens_N, enters_N, positions_N, AttentionMetadata(*found, slots_N=picked.rows_N))

    def arrive(self, entering: Entering, x_NM: Tensor) -> None:
        self._arrive(entering.rows_N, entering.live_N, entering.positions_N, x_NM)

    def _begin_core_plain(self, rows: int) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        recursion_S = (s.stage_S - CORE).clamp(0, parts.plan.recursions - 1)
        table_S = self._tables_R[recursion_S]
        ranks_S = s.entries_ST.gather(1, table_S[:, None])[:, 0] if self._own else s.position_S
        fits_S = ranks_S < s.capacity_ST.gather(1, table_S[:, None])[:, 0]
        waits_S = (s.stage_S >= CORE) & (s.stage_S < self.turn) & fits_S
        rows_N = pick(waits_S, s.since_S, rows)
        valid_N = rows_N != s.spare
        recursion_N = recursion_S[rows_N]
        writes_N = recursion_N == 0 if parts.plan.kv == "share" else None
        offset_N = self._planes.offset(recursion_N)
        at = (rows_N, table_S[rows_N], ranks_S[rows_N], valid_N)
        seen = attention_for(s.tables_STP, *at, parts.page_size, writes_N, offset_N)
        positions_N = torch.where(valid_N, s.position_S[rows_N], 0)
        x_NM = s.x_SM.index_select(0, rows_N)
        return rows_N, recursion_N, valid_N, positions_N, x_NM, seen.slot_mapping_N, seen.table_NP, seen.lengths_N

    def _end_core_plain(
        self, rows_N: Tensor, recursion_N: Tensor, valid_N: Tensor, positions_N: Tensor, out_NM: Tensor
    ) -> None:
        s, kept = self.parts.state, self.slots
        x_NM, gates_NR = s.x_SM.index_select(0, rows_N), kept.gates_SR.index_select(0, rows_N)
        first_NM = kept.first_SM.index_select(0, rows_N) if self.routers.keeps_first else x_NM
        numbers_NC = s.numbers_SC.index_select(0, rows_N)
        new_NM = self.routers.updated(recursion_N, x_NM, out_NM, gates_NR, first_NM, numbers_NC)
        s.x_SM.index_copy_(0, rows_N, torch.where(valid_N[:, None], new_NM, 0.0).to(s.x_SM.dtype))
        kept.depth_S.index_copy_(0, rows_N, recursion_N + 1)
        if self._own:
            table_N = self._tables_R[recursion_N]
            s.entries_ST.index_put_((rows_N, table_N), s.entries_ST[rows_N, table_N] + valid_N.long())
        next_N = recursion_N + 1
        go_N, gates_NR = self.routers.decide(next_N, new_NM, gates_NR, positions_N, numbers_NC)
        self._wait(rows_N, valid_N, torch.where(go_N, CORE + next_N, self.turn), gates_NR)

    def _begin_turn_plain(self, rows: int) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        ranks_S = s.entries_ST[:, 0] if self._own else s.position_S
        enters_S = (s.stage_S == ENTER) & (ranks_S < s.capacity_ST[:, 0])
        rows_N = pick((s.stage_S == self.turn) | enters_S, s.since_S, rows)
        through_N = s.stage_S[rows_N] == self.turn
        # Without prelude and coda the first table is the first recursion's, which has counted the token; nobody asks then.
        ranks_N = ranks_S[rows_N] if self._coda else torch.zeros_like(rows_N)
        seen = attention_for(s.tables_STP, rows_N, torch.zeros_like(rows_N), ranks_N, through_N, parts.page_size)
        positions_N = torch.where(through_N, s.position_S[rows_N], 0)
        x_NM, depth_N = s.x_SM.index_select(0, rows_N), self.slots.depth_S.index_select(0, rows_N)
        return rows_N, depth_N, through_N, positions_N, x_NM, seen.slot_mapping_N, seen.table_NP, seen.lengths_N

    def _enter_plain(self, rows_N: Tensor, through_N: Tensor) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        if self._own and self._coda:
            s.entries_ST.index_put_((rows_N, torch.zeros_like(rows_N)), s.entries_ST[rows_N, 0] + through_N.long())
        stage_N = s.stage_S[rows_N]
        ranks_N = s.entries_ST[rows_N, 0] if self._own else s.position_S[rows_N]
        goes_N = (rows_N != s.spare) & (stage_N != IDLE)
        enters_N = goes_N & (ranks_N < s.capacity_ST[rows_N, 0])
        waits_N = torch.where(goes_N, torch.where(enters_N, CORE, ENTER), IDLE)
        s.stage_S.index_copy_(0, rows_N, waits_N)
        seen = attention_for(s.tables_STP, rows_N, torch.zeros_like(rows_N), ranks_N, enters_N, parts.page_size)
        positions_N = torch.where(enters_N, s.position_S[rows_N], 0)
        return s.token_S[rows_N], enters_N, positions_N, seen.slot_mapping_N, seen.table_NP, seen.lengths_N

    def _arrive_plain(self, rows_N: Tensor, enters_N: Tensor, positions_N: Tensor, x_NM: Tensor) -> None:
        s = self.parts.state
        kept_NM = torch.where(enters_N[:, None], x_NM, 0.0).to(s.x_SM.dtype)
        s.x_SM.index_copy_(0, rows_N, kept_NM)
        if self.routers.keeps_first:
            self.slots.first_SM.index_copy_(0, rows_N, kept_NM)
        gates_NR = self.routers.ask(kept_NM)
        next_N = torch.zeros_like(rows_N)
        numbers_NC = s.numbers_SC.index_select(0, rows_N)
        _, gates_NR = self.routers.decide(next_N, kept_NM, gates_NR, positions_N, numbers_NC)
        self._wait(rows_N, enters_N, torch.full_like(rows_N, CORE), gates_NR)

    def _wait(self, rows_N: Tensor, valid_N: Tensor, stage_N: Tensor, gates_NR: Tensor) -> None:
        s = self.parts.state
        self.slots.gates_SR.index_copy_(0, rows_N, gates_NR)
        s.stage_S.index_copy_(0, rows_N, torch.where(valid_N, stage_N, s.stage_S[rows_N]))
        s.since_S.index_copy_(0, rows_N, torch.where(valid_N, s.clock.expand_as(rows_N), s.since_S[rows_N]))


class TritonQueue:
    def __init__(self, parts: ProgramContext, routers: BatchRouters, ahead_slots: int = AHEAD_SLOTS) -> None:
        self.parts, self.routers, self._ahead = parts, routers, parts.state.slots > ahead_slots
        self.slots = RoutedSlots.build(parts, routers)
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
        self._waiting_S = torch.empty(s.slots if self._ahead else 0, dtype=torch.int64, device=s.device)

    def begin_core(self, rows: int) -> PickedRows:
        return self._pick(rows, turn=False)

    def begin_turn(self, rows: int) -> PickedRows:
        return self._pick(rows, turn=True)

    def _pick(self, N: int, turn: bool) -> PickedRows:
        s, kept = self.parts.state, self.slots
        rows_N, recursion_N = self._numbers(N), self._numbers(N)
        live_N, x_NM = self._marks(N), s.x_SM.new_empty(N, s.x_SM.shape[1])
        positions_N, seen = self._numbers(N), self._empty_attention(N)
        assert seen.angles is not None
        depth_N = recursion_N  # one of the two is asked for
        if self._ahead:
            routed_rows.waiting_kernel[(triton.cdiv(s.slots, BLOCK),)](
                s.stage_S, s.since_S, s.position_S, s.entries_ST, s.capacity_ST, self._tables_R, self._waiting_S, s.spare,
                BLOCK=BLOCK, R=self._hidden["R"], TURN=turn, **self._common, num_warps=WARPS,
            )  # fmt: skip
        routed_rows.pick_kernel[(max(s.slots, N),)](
            s.stage_S, s.since_S, s.position_S, s.entries_ST, s.capacity_ST, s.clock, self._tables_R, s.x_SM, kept.depth_S,
            rows_N, recursion_N, live_N, x_NM, depth_N, s.tables_STP, *self._angles,
            positions_N, seen.slot_mapping_N, seen.lengths_N, seen.table_NP, *seen.angles, self._waiting_S, s.spare, N,
            SLOTS=triton.next_power_of_2(s.slots), AHEAD=self._ahead, TURN=turn,
            **self._common, **self._seen, **self._hidden,
        )  # fmt: skip
        return PickedRows(rows_N, recursion_N, live_N, positions_N, x_NM, seen)

    def enter(self, picked: PickedRows) -> Entering:
        s, N = self.parts.state, len(picked.rows_N)
        tokens_N, enters_N, positions_N = self._numbers(N), self._marks(N), self._numbers(N)
        seen = self._empty_attention(N)
        assert seen.angles is not None
        routed_rows.enter_kernel[(N,)](
            s.token_S, s.stage_S, s.position_S, s.entries_ST, s.capacity_ST, picked.rows_N, picked.live_N, tokens_N,
            enters_N, s.tables_STP, *self._angles, positions_N, seen.slot_mapping_N, seen.lengths_N, seen.table_NP,
            *seen.angles, s.spare, **self._common, **self._seen,
        )  # fmt: skip
        return Entering(picked.rows_N, tokens_N, enters_N, positions_N, seen)

    def end_core(self, picked: PickedRows, out_NM: Tensor) -> None:
        self._move(picked.rows_N, picked.recursion_N, picked.live_N, picked.positions_N, out_NM, arrives=False)

    def arrive(self, entering: Entering, x_NM: Tensor) -> None:
        rows_N = entering.rows_N
        self._move(rows_N, rows_N, entering.live_N, entering.positions_N, x_NM, arrives=True)

    def _move(
        self, rows_N: Tensor, recursion_N: Tensor, live_N: Tensor, positions_N: Tensor, out_NM: Tensor, arrives: bool
    ) -> None:
        s, kept, routers, w = self.parts.state, self.slots, self.routers, self._routing
        routing = routers.routing
        choice = "forced" if routers.forced is not None else "random" if routing.random else "router"
        routed_rows.move_kernel[(len(rows_N),)](
            rows_N, recursion_N, live_N, positions_N, out_NM, w.main_RM, w.judge_RM, w.selective_R, w.least_R,
            s.x_SM, kept.gates_SR, kept.depth_S, s.entries_ST, self._tables_R, s.stage_S, s.since_S, s.token_S,
            s.epoch_S, s.max_depth_S, s.clock, routing.alpha, routers.bias,
            LOGITS=triton.next_power_of_2(routing.recursions), ARRIVES=arrives, SCORE=routing.score,
            CHANGE=routing.update != "add", CHOICE=choice, **self._common, **self._hidden, num_warps=WARPS,
        )  # fmt: skip

    def _numbers(self, N: int) -> Tensor:
        return torch.empty(N, dtype=torch.int64, device=self.parts.state.device)

    def _marks(self, N: int) -> Tensor:
        return torch.empty(N, dtype=torch.bool, device=self.parts.state.device)

    def _empty_attention(self, N: int) -> AttentionMetadata:
        s, D = self.parts.state, self._seen["D"]
        table_NP = torch.empty(N, s.tables_STP.shape[2], dtype=torch.int32, device=s.device)
        lengths_N = torch.empty(N, dtype=torch.int32, device=s.device)
        angles = (s.x_SM.new_empty(N, D), s.x_SM.new_empty(N, D))
        return AttentionMetadata(self._numbers(N), table_NP, lengths_N, angles=angles)
