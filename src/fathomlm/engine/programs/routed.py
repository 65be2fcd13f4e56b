"""Mixture-of-Recursions: tokens of different recursions in one batch (thesis 3.3.5 and 4.4.3).

    turn    coda, scores and choice for tokens that are through; then the next token's embedding and prelude
    core    one pass of the shared block over rows that wait for it, each at its own recursion

A tick is a few turns, each behind some passes of the block: as many as tokens need on average. Every pass takes the rows
that have waited longest. With more sequences in flight than rows, no pass has holes. Routers decide on the device. `first`
is what entered the first recursion, which token-choice adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.engine.programs.base import Choosing, How, Parts, Record
from fathomlm.engine.routing import RowRouters
from fathomlm.engine.rows import Reach, pick, reach
from fathomlm.engine.state import ENTER, IDLE, Placed

MOST_TURNS = 4
CORE = 1
"""The stage of a row that waits for its first recursion; for its second, CORE + 1; behind the last one comes the turn."""


class RoutedProgram:
    def __init__(self, parts: Parts, routers: RowRouters, cores: Sequence[int] = (1,)) -> None:
        """`cores` are the passes of the block in front of each turn of a tick."""
        self.parts, self.routers, self.cores = parts, routers, tuple(cores)
        s, plan = parts.state, parts.plan
        self.record = Record.empty(parts.rows * len(self.cores), parts.sampler.max_logprobs, s.device)
        self._coda = [step for step in plan if step.part == "coda"]
        self._prelude = [step for step in plan if step.part == "prelude"]
        self._core = plan.recursion_steps(0)
        self.turn = CORE + plan.recursions
        self._tables_R = torch.tensor(parts.layout.recursion_tables, device=s.device)
        self._own = plan.kv == "cache"
        # What stays in a slot between passes, beside the stream: what the router said, the stream that entered the core,
        # the depth reached.
        self.said_SR = torch.zeros(s.slots + 1, plan.recursions, device=s.device)
        self.first_SM = torch.zeros_like(s.x_SM) if routers.keeps_first else s.x_SM[:0]
        self.depth_S = torch.zeros(s.slots + 1, dtype=torch.int64, device=s.device)
        self._sure_N = torch.zeros(parts.rows, device=s.device)
        self._begin_core, self._end_core = parts.small(self._begin_core_plain), parts.small(self._end_core_plain)
        self._begin_turn, self._enter_row = parts.small(self._begin_turn_plain), parts.small(self._enter_row_plain)
        self._arrive = parts.small(self._arrive_plain)
        self._choose = Choosing(parts)

    def tick(self, how: How) -> None:
        for number, passes in enumerate(self.cores):
            for _ in range(passes):
                self.core()
            self.turn_over(how, self.record.part(number, self.parts.rows))

    # The shared block.

    def core(self) -> None:
        layers, s = self.parts.layers, self.parts.state
        rows_N, recursion_N, valid_N, positions_N, x_NM, *found = self._begin_core()
        if self.parts.idle(valid_N):
            return
        out_NM = layers.run(x_NM, self._core, Reach(*found), positions_N, recursion_N)
        self._end_core(rows_N, recursion_N, valid_N, positions_N, x_NM, out_NM)
        s.clock.add_(1)

    def _begin_core_plain(self) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        recursion_S = (s.stage_S - CORE).clamp(0, parts.plan.recursions - 1)
        table_S = self._tables_R[recursion_S]
        ranks_S = s.entries_ST.gather(1, table_S[:, None])[:, 0] if self._own else s.position_S
        fits_S = ranks_S < s.room_ST.gather(1, table_S[:, None])[:, 0]
        waits_S = (s.stage_S >= CORE) & (s.stage_S < self.turn) & fits_S
        rows_N = pick(waits_S, s.since_S, parts.rows)
        valid_N = rows_N != s.spare
        recursion_N = recursion_S[rows_N]
        writes_N = None if self._own else recursion_N == 0
        seen = reach(s.tables_STP, rows_N, table_S[rows_N], ranks_S[rows_N], valid_N, parts.page_size, writes_N)
        positions_N = torch.where(valid_N, s.position_S[rows_N], 0)
        x_NM = s.x_SM.index_select(0, rows_N)
        return rows_N, recursion_N, valid_N, positions_N, x_NM, seen.slots_N, seen.table_NP, seen.lengths_N

    def _end_core_plain(
        self, rows_N: Tensor, recursion_N: Tensor, valid_N: Tensor, positions_N: Tensor, x_NM: Tensor, out_NM: Tensor
    ) -> None:
        s = self.parts.state
        said_NR = self.said_SR.index_select(0, rows_N)
        first_NM = self.first_SM.index_select(0, rows_N) if self.routers.keeps_first else x_NM
        numbers_NC = s.numbers_SC.index_select(0, rows_N)
        new_NM = self.routers.updated(recursion_N, x_NM, out_NM, said_NR, first_NM, numbers_NC)
        s.x_SM.index_copy_(0, rows_N, torch.where(valid_N[:, None], new_NM, 0.0).to(s.x_SM.dtype))
        self.depth_S.index_copy_(0, rows_N, recursion_N + 1)
        if self._own:
            table_N = self._tables_R[recursion_N]
            s.entries_ST.index_put_((rows_N, table_N), s.entries_ST[rows_N, table_N] + valid_N.long())
        next_N = recursion_N + 1
        go_N, said_NR = self.routers.decide(next_N, new_NM, said_NR, positions_N, numbers_NC)
        self._wait(rows_N, valid_N, torch.where(go_N, CORE + next_N, self.turn), said_NR)

    # Choosing a token, and running the next one up to the core.

    def turn_over(self, how: How, record: Record) -> None:
        layers, s = self.parts.layers, self.parts.state
        rows_N, through_N, positions_N, x_NM, *found = self._begin_turn()
        if self.parts.idle(rows_N != s.spare):
            record.blank(s.spare)
            return
        x_NM = layers.run(x_NM, self._coda, Reach(*found), positions_N)
        scores_NV = layers.scores(x_NM)
        depth_N = self.depth_S.index_select(0, rows_N)
        self._choose(scores_NV, rows_N, through_N, depth_N, self._sure_N, how, record)
        tokens_N, enters_N, positions_N, *found = self._enter_row(rows_N, through_N)
        x_NM = layers.run(layers.enter(tokens_N), self._prelude, Reach(*found), positions_N)
        self._arrive(rows_N, enters_N, positions_N, x_NM)
        s.clock.add_(1)

    def _begin_turn_plain(self) -> tuple[Tensor, ...]:
        """Rows that are through, and rows whose token has yet to enter and has room to."""
        parts, s = self.parts, self.parts.state
        ranks_S = s.entries_ST[:, 0] if self._own else s.position_S
        enters_S = (s.stage_S == ENTER) & (ranks_S < s.room_ST[:, 0])
        rows_N = pick((s.stage_S == self.turn) | enters_S, s.since_S, parts.rows)
        through_N = s.stage_S[rows_N] == self.turn
        ranks_N = self._rank_of_token(ranks_S[rows_N])
        none_N = torch.zeros_like(rows_N)
        seen = reach(s.tables_STP, rows_N, none_N, ranks_N, through_N, parts.page_size)
        positions_N = torch.where(through_N, s.position_S[rows_N], 0)
        return (
            rows_N, through_N, positions_N, s.x_SM.index_select(0, rows_N), seen.slots_N, seen.table_NP, seen.lengths_N
        )  # fmt: skip

    def _rank_of_token(self, ranks_N: Tensor) -> Tensor:
        """The place of the current token's entry in the first table. Without prelude and coda that table is the first
        recursion's, which has counted it already; nobody asks then."""
        return ranks_N if self._coda else torch.zeros_like(ranks_N)

    def _enter_row_plain(self, rows_N: Tensor, through_N: Tensor) -> tuple[Tensor, ...]:
        """After the choice: the next token of each row, if there is one and it has room."""
        parts, s = self.parts, self.parts.state
        if self._own and self._coda:
            s.entries_ST.index_put_((rows_N, torch.zeros_like(rows_N)), s.entries_ST[rows_N, 0] + through_N.long())
        stage_N = s.stage_S[rows_N]
        ranks_N = s.entries_ST[rows_N, 0] if self._own else s.position_S[rows_N]
        goes_N = (rows_N != s.spare) & (stage_N != IDLE)
        enters_N = goes_N & (ranks_N < s.room_ST[rows_N, 0])
        waits_N = torch.where(goes_N, torch.where(enters_N, CORE, ENTER), IDLE)
        s.stage_S.index_copy_(0, rows_N, waits_N)
        none_N = torch.zeros_like(rows_N)
        seen = reach(s.tables_STP, rows_N, none_N, ranks_N, enters_N, parts.page_size)
        positions_N = torch.where(enters_N, s.position_S[rows_N], 0)
        return s.token_S[rows_N], enters_N, positions_N, seen.slots_N, seen.table_NP, seen.lengths_N

    def _arrive_plain(self, rows_N: Tensor, enters_N: Tensor, positions_N: Tensor, x_NM: Tensor) -> None:
        """The stream in front of the core: who goes how deep is asked for the first time."""
        s = self.parts.state
        kept_NM = torch.where(enters_N[:, None], x_NM, 0.0).to(s.x_SM.dtype)
        s.x_SM.index_copy_(0, rows_N, kept_NM)
        if self.routers.keeps_first:
            self.first_SM.index_copy_(0, rows_N, kept_NM)
        said_NR = self.routers.ask(kept_NM)
        next_N = torch.zeros_like(rows_N)
        numbers_NC = s.numbers_SC.index_select(0, rows_N)
        _, said_NR = self.routers.decide(next_N, kept_NM, said_NR, positions_N, numbers_NC)
        self._wait(rows_N, enters_N, torch.full_like(rows_N, CORE), said_NR)

    def _wait(self, rows_N: Tensor, valid_N: Tensor, stage_N: Tensor, said_NR: Tensor) -> None:
        s = self.parts.state
        self.said_SR.index_copy_(0, rows_N, said_NR)
        s.stage_S.index_copy_(0, rows_N, torch.where(valid_N, stage_N, s.stage_S[rows_N]))
        s.since_S.index_copy_(0, rows_N, torch.where(valid_N, s.clock.expand_as(rows_N), s.since_S[rows_N]))

    def place(self, placed: Sequence[Placed]) -> None:
        """Nothing of a slot's own outlives its sequence."""

    # Reading known tokens.

    def read(self, slot: int, tokens_N: Tensor, first: int) -> None:
        """Each recursion over the tokens that go on; how many they are is asked of the device."""
        parts, s, layers = self.parts, self.parts.state, self.parts.layers
        positions_N = torch.arange(first, first + tokens_N.shape[0], device=s.device)
        x_NM = self._read_all(slot, layers.enter(tokens_N), positions_N, self._prelude)
        first_NM = x_NM
        numbers_NC = s.numbers_SC[slot].expand(len(tokens_N), -1)
        said_NR = self.routers.ask(x_NM)
        on_N = torch.ones_like(positions_N, dtype=torch.bool)
        for recursion in range(parts.plan.recursions):
            asked_N = torch.full_like(positions_N, recursion)
            go_N, said_NR = self.routers.decide(asked_N, x_NM, said_NR, positions_N, numbers_NC)
            on_N = on_N & go_N
            at_K = on_N.nonzero()[:, 0]
            if not len(at_K):
                break
            table = parts.layout.recursion_tables[recursion]
            before = s.entries_ST[slot, table]
            ranks_K = before + torch.arange(len(at_K), device=s.device) if self._own else positions_N[at_K]
            rows_K, valid_K = torch.full_like(at_K, slot), torch.ones_like(at_K, dtype=torch.bool)
            writes_K = None if self._own else torch.full_like(valid_K, recursion == 0)
            seen = reach(s.tables_STP, rows_K, torch.full_like(at_K, table), ranks_K, valid_K, parts.page_size, writes_K)
            old_KM = x_NM[at_K]
            recursion_K = torch.full_like(at_K, recursion)
            out_KM = layers.run(old_KM, self._core, seen, positions_N[at_K], recursion_K)
            new_KM = self.routers.updated(recursion_K, old_KM, out_KM, said_NR[at_K], first_NM[at_K], numbers_NC[at_K])
            x_NM = x_NM.index_copy(0, at_K, new_KM.to(x_NM.dtype))
            if self._own:
                s.entries_ST[slot, table] += len(at_K)
        self._read_all(slot, x_NM, positions_N, self._coda)
        if not self._own or self._coda:
            s.entries_ST[slot, 0] += len(tokens_N)

    def _read_all(self, slot: int, x_NM: Tensor, positions_N: Tensor, steps: Sequence[Step]) -> Tensor:
        parts, s = self.parts, self.parts.state
        rows_N, none_N = torch.full_like(positions_N, slot), torch.zeros_like(positions_N)
        seen = reach(s.tables_STP, rows_N, none_N, positions_N, torch.ones_like(rows_N, dtype=torch.bool), parts.page_size)
        return parts.layers.run(x_NM, steps, seen, positions_N)


def passes_for(depth: float) -> tuple[int, ...]:
    """Passes of the block in front of each turn, so that rows find as many as tokens of this mean depth need."""
    turns = min(range(1, MOST_TURNS + 1), key=lambda many: (abs(round(depth * many) / many - depth), many))
    total = max(turns, round(depth * turns))
    return tuple(total * (i + 1) // turns - total * i // turns for i in range(turns))
