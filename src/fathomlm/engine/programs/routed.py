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

from fathomlm.engine.device_state import PrefillBatch
from fathomlm.engine.kv_pages import reach
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant, StepOutput, TokenChooser
from fathomlm.engine.programs.bookkeeping import Book, PlainBook
from fathomlm.engine.programs.kernel_book import KernelBook
from fathomlm.engine.programs.whole import count_entries, prefill_steps
from fathomlm.engine.routing import POSITION, TOKEN, BatchRouters
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.triton_here import triton

MOST_TURNS = 4


def build_book(parts: ProgramContext, routers: BatchRouters) -> Book:
    s, a = parts.state, parts.layers.architecture
    whole = a.rotary_dim == a.head_dim and parts.layers.fused
    if triton is not None and s.device.type == "cuda" and routers.linear and whole:
        return KernelBook(parts, routers)
    return PlainBook(parts, routers)


class RoutedProgram:
    def __init__(self, parts: ProgramContext, routers: BatchRouters, cores: Sequence[int] = (1,)) -> None:
        """`cores` are the passes of the block in front of each turn of a tick."""
        self.parts, self.routers, self.cores = parts, routers, tuple(cores)
        s, plan = parts.state, parts.plan
        self.output = StepOutput.empty(parts.batch_size * len(self.cores), parts.sampler.max_logprobs, s.device)
        self._coda = [step for step in plan if step.part == "coda"]
        self._prelude = [step for step in plan if step.part == "prelude"]
        self._core = plan.recursion_steps(0)
        self._own = plan.kv == "cache"
        self.book = build_book(parts, routers)
        self.said_SR, self.first_SM, self.depth_S = self.book.slots
        self._sure_N = torch.zeros(parts.batch_size, device=s.device)
        self._choose = TokenChooser(parts)

    def decode_step(self, variant: SamplingVariant) -> None:
        for number, passes in enumerate(self.cores):
            for _ in range(passes):
                self.core()
            self.turn_over(variant, self.output.part(number, self.parts.batch_size))

    def core(self) -> None:
        """A pass of the shared block."""
        taken = self.book.begin_core()
        if self.parts.idle(taken.live_N):
            return
        run = self.parts.layers.run
        out_NM = run(taken.x_NM, self._core, taken.reach, taken.positions_N, taken.recursion_N, spend=True)
        self.book.end_core(taken, out_NM)

    def turn_over(self, variant: SamplingVariant, output: StepOutput) -> None:
        """Choose a token, and run the next one up to the core."""
        layers, s = self.parts.layers, self.parts.state
        taken = self.book.begin_turn()
        if self.parts.idle(taken.rows_N != s.spare):
            output.blank(s.spare)
            return
        x_NM = layers.run(taken.x_NM, self._coda, taken.reach, taken.positions_N, spend=True)
        self._choose(layers.scores(x_NM), taken.rows_N, taken.live_N, taken.recursion_N, self._sure_N, variant, output)
        entering = self.book.enter(taken)
        x_NM = layers.enter(entering.tokens_N)
        x_NM = layers.run(x_NM, self._prelude, entering.reach, entering.positions_N, spend=True)
        self.book.arrive(entering, x_NM)

    def place(self, placements: Sequence[Placement], threshold: float) -> None:
        """Nothing of a slot's own outlives its sequence."""

    # Prefill.

    def prefill(self, batch: PrefillBatch) -> None:
        """Each recursion over the tokens that go on; how many they are is asked of the device."""
        parts, s, layers = self.parts, self.parts.state, self.parts.layers
        slots_N, positions_N = batch.slots_N, batch.positions_N
        x_NM = prefill_steps(parts, batch, layers.enter(batch.tokens_N), self._prelude)
        first_NM = x_NM
        numbers_NC = s.numbers_SC[slots_N]
        numbers_NC[:, TOKEN], numbers_NC[:, POSITION] = batch.tokens_N, positions_N
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
            slots_K, table_K, valid_K = slots_N[at_K], torch.full_like(at_K, table), torch.ones_like(at_K, dtype=torch.bool)
            ranks_N = s.entries_ST[slots_N, table] + _before(on_N, batch.starts_N) if self._own else positions_N
            writes_K = None if self._own else torch.full_like(valid_K, recursion == 0)
            seen = reach(s.tables_STP, slots_K, table_K, ranks_N[at_K], valid_K, parts.page_size, writes_K)
            old_KM = x_NM[at_K]
            recursion_K = torch.full_like(at_K, recursion)
            out_KM = layers.run(old_KM, self._core, seen, positions_N[at_K], recursion_K)
            new_KM = self.routers.updated(recursion_K, old_KM, out_KM, said_NR[at_K], first_NM[at_K], numbers_NC[at_K])
            x_NM = x_NM.index_copy(0, at_K, new_KM.to(x_NM.dtype))
            if self._own:
                count_entries(s, table, slots_K)
        prefill_steps(parts, batch, x_NM, self._coda)
        if not self._own or self._coda:
            count_entries(s, 0, slots_N)


def _before(on_N: Tensor, starts_N: Tensor) -> Tensor:
    """How many rows of the same sequence that go on stand in front of each."""
    upto_N = on_N.long().cumsum(0)
    first_N = upto_N[starts_N] - on_N[starts_N].long()
    return upto_N - on_N.long() - first_N


def passes_for(depth: float) -> tuple[int, ...]:
    """Passes of the block in front of each turn, so that rows find as many as tokens of this mean depth need."""
    turns = min(range(1, MOST_TURNS + 1), key=lambda many: (abs(round(depth * many) / many - depth), many))
    total = max(turns, round(depth * turns))
    return tuple(total * (i + 1) // turns - total * i // turns for i in range(turns))
