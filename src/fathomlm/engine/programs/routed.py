"""Mixture-of-Recursions: tokens of different recursions in one batch (thesis 3.3.5 and 4.4.3).

    turn    coda, scores and choice for tokens that are through; then the next token's embedding and prelude
    core    one pass of the shared block over rows that wait for it, each at its own recursion

A step is a few turns, each behind some passes of the block: as many as tokens need on average (`engine.core_passes`). Every
pass takes the rows that have waited longest. With more sequences in flight than rows, no pass has holes. Routers decide on
the device. `first` is what entered the first recursion, which token-choice adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fathomlm.decode.exiting import Threshold
from fathomlm.engine.batch_routers import POSITION, TOKEN, BatchRouters
from fathomlm.engine.core_passes import spread
from fathomlm.engine.device_state import PrefillBatch
from fathomlm.engine.kv_pages import attention_for
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant, StepOutput, TokenChooser
from fathomlm.engine.programs.routed_queue import RecursionPlanes, build_queue
from fathomlm.engine.programs.whole import count_entries, prefill_steps
from fathomlm.engine.schedule import Placement


class RoutedProgram:
    def __init__(self, parts: ProgramContext, routers: BatchRouters, cores: Sequence[int] = (1,)) -> None:
        """`cores` are the passes of the block in front of each turn of a decode step, unless it is told otherwise."""
        self.parts, self.routers, self.cores = parts, routers, tuple(cores)
        s, plan = parts.state, parts.plan
        self.recursions = plan.recursions
        self.output = StepOutput.empty(parts.batch_size * len(self.cores), parts.sampler.max_logprobs, s.device)
        self._coda = [step for step in plan if step.part == "coda"]
        self._prelude = [step for step in plan if step.part == "prelude"]
        self._core = plan.recursion_steps(0)
        self._own = plan.kv == "cache"
        self.queue = build_queue(parts, routers)
        self._planes = RecursionPlanes.of(parts)
        loops = [[parts.layout.home(step)[1] for step in plan.recursion_steps(r)] for r in range(plan.recursions)]
        self._planes_RL = torch.tensor(loops, device=s.device)
        self.gates_SR, self.first_SM, self.depth_S = self.queue.slots
        self._confidence_N = torch.zeros(parts.batch_size, device=s.device)
        self._choose = TokenChooser(parts)

    def decode_step(self, variant: SamplingVariant) -> None:
        cores = self.cores if variant.passes is None else spread(variant.passes, len(self.cores))
        rows = variant.rows or self.parts.batch_size
        for number, passes in enumerate(cores):
            for _ in range(passes):
                self.core(rows)
            self.turn_over(variant, self.output.part(number, rows))

    def core(self, rows: int) -> None:
        """A pass of the shared block."""
        picked = self.queue.begin_core(rows)
        if self.parts.idle(picked.live_N):
            return
        run = self.parts.layers.run
        out_NM = run(picked.x_NM, self._core, picked.attention, picked.positions_N, picked.recursion_N, spend=True)
        if self._planes.pages:
            first_N = picked.live_N & (picked.recursion_N == 0)
            self._serve_all(torch.where(first_N, picked.attention.slot_mapping_N, -1))
        self.queue.end_core(picked, out_NM)

    def _serve_all(self, slots_N: Tensor) -> None:
        """hybrid: what the first recursion made of a token stands in every later one, until that makes its own."""
        self.parts.layers.pages.repeat(0, self._planes_RL, slots_N, torch.zeros_like(slots_N))

    def turn_over(self, variant: SamplingVariant, output: StepOutput) -> None:
        """Choose a token, and run the next one up to the core."""
        layers, s, rows = self.parts.layers, self.parts.state, len(output.ints_NC)
        picked = self.queue.begin_turn(rows)
        if self.parts.idle(picked.rows_N != s.spare):
            output.blank(s.spare)
            return
        x_NM = layers.run(picked.x_NM, self._coda, picked.attention, picked.positions_N, spend=True)
        self._choose(
            layers.scores(x_NM), picked.rows_N, picked.live_N, picked.recursion_N, self._confidence_N[:rows], variant, output
        )
        entering = self.queue.enter(picked)
        x_NM = layers.enter(entering.tokens_N)
        x_NM = layers.run(x_NM, self._prelude, entering.attention, entering.positions_N, spend=True)
        self.queue.arrive(entering, x_NM)

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        """Nothing of a slot's own outlives its sequence."""

    # Prefill.

    def prefill(self, batch: PrefillBatch) -> None:
        """Each recursion over the tokens that go on. Where the device may not be asked how many they are, the rows behind
        them stand for nothing."""
        parts, s, layers = self.parts, self.parts.state, self.parts.layers
        slots_N, positions_N = batch.slots_N, batch.positions_N
        x_NM, _ = prefill_steps(parts, batch, layers.enter(batch.tokens_N), self._prelude)
        first_NM = x_NM
        numbers_NC = s.numbers_SC[slots_N]
        numbers_NC[:, TOKEN], numbers_NC[:, POSITION] = batch.tokens_N, positions_N
        gates_NR = self.routers.ask(x_NM)
        on_N = slots_N != s.spare
        for recursion in range(parts.plan.recursions):
            asked_N = torch.full_like(positions_N, recursion)
            go_N, gates_NR = self.routers.decide(asked_N, x_NM, gates_NR, positions_N, numbers_NC)
            on_N = on_N & go_N
            if recursion == 0:  # every token runs it (`layout_for`): nothing to ask
                at_K, valid_K = torch.arange(len(on_N), device=on_N.device), on_N
            else:
                at_K, valid_K = _going_on(on_N, batch.asks)
            if not len(at_K):
                break
            table = parts.layout.recursion_tables[recursion]
            slots_K, positions_K = torch.where(valid_K, slots_N[at_K], s.spare), torch.where(valid_K, positions_N[at_K], 0)
            table_K = torch.full_like(at_K, table)
            ranks_N = s.entries_ST[slots_N, table] + _before(on_N, batch.starts_N) if self._own else positions_N
            writes_K = torch.full_like(valid_K, recursion == 0) if parts.plan.kv == "share" else None
            recursion_K = torch.full_like(at_K, recursion)
            offset_K = self._planes.offset(recursion_K)
            seen = attention_for(
                s.tables_STP, slots_K, table_K, ranks_N[at_K], valid_K, parts.page_size, writes_K, offset_K, together=True
            )
            seen = replace(seen, planes=self._planes.planes)
            old_KM = x_NM[at_K]
            out_KM = layers.run(old_KM, self._core, seen, positions_K, recursion_K)
            if self._planes.pages and recursion == 0:
                self._serve_all(seen.slot_mapping_N)
            new_KM = self.routers.updated(recursion_K, old_KM, out_KM, gates_NR[at_K], first_NM[at_K], numbers_NC[at_K])
            x_NM = x_NM.index_copy(0, at_K, torch.where(valid_K[:, None], new_KM, old_KM).to(x_NM.dtype))
            if self._own:
                count_entries(s, table, slots_K)
            elif not self._coda and not self._planes.pages:
                break  # nothing behind the first recursion stores entries
        prefill_steps(parts, batch, x_NM, self._coda)
        if not self._own or self._coda:
            count_entries(s, 0, slots_N)


def _going_on(on_N: Tensor, asks: bool) -> tuple[Tensor, Tensor]:
    """Which rows a recursion takes, and which of those go on. Unless the device is asked how many they are it takes all of
    them, those that go on first: rows of a sequence stand together and in order, and attention has the rest behind them."""
    if asks:
        at_K = on_N.nonzero()[:, 0]
        return at_K, torch.ones_like(at_K, dtype=torch.bool)
    at_N = (~on_N).to(torch.int8).argsort(stable=True)
    return at_N, on_N[at_N]


def _before(on_N: Tensor, starts_N: Tensor) -> Tensor:
    """How many rows of the same sequence that go on stand in front of each."""
    upto_N = on_N.long().cumsum(0)
    first_N = upto_N[starts_N] - on_N[starts_N].long()
    return upto_N - on_N.long() - first_N
