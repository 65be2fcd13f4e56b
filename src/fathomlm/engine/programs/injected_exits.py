"""Exits between loops that begin with an injection (Huginn): segments are loops alone.

A token runs the prelude in front of its first loop, and carries its output along, since every loop begins with it. At each
exit the coda runs over the state there, as it would at the end: that is what the token is chosen from. The coda's entries
are those of the last state that it saw. A token that leaves has its last loop's entries in each deeper one (`entry_copy`).

Shapes: N rows, M hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fathomlm.decode.confidence import AtExit
from fathomlm.depth import Step
from fathomlm.engine.device_state import PrefillBatch
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import SamplingVariant, StepOutput
from fathomlm.engine.programs.exit_decisions import ALL, Rows
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.whole import count_entries, prefill_steps


class InjectedExitProgram(ExitProgram):
    streams = 2

    def _segments(self) -> list[tuple[Step, ...]]:
        plan = self.parts.plan
        self.prelude = [step for step in plan if step.part == "prelude"]
        self.coda = [step for step in plan if step.part == "coda"]
        cuts = (len(self.prelude), *self.cuts[:-1], plan.unrolled_layers - len(self.coda))
        return [plan.steps[first:end] for first, end in pairwise(cuts)]

    def prefill(self, batch: PrefillBatch) -> None:
        """Tokens that leave wait for the others in front of the coda, where each looks at those before it."""
        assert self.copies == "entries"
        x_NM, whole = self.parts.layers.enter(batch.tokens_N), batch
        count_entries(self.parts.state, 0, batch.slots_N)
        x_NM, _ = prefill_steps(self.parts, batch, x_NM, self.prelude)
        left_NM, at_N = torch.zeros_like(x_NM), torch.arange(len(x_NM), device=x_NM.device)
        x_NM = _begun(x_NM)
        for k, steps in enumerate(self.segments):
            x_NM, seen = prefill_steps(self.parts, batch, x_NM, steps)
            left_NM[at_N] = x_NM[:, : left_NM.shape[1]]
            if k == self.last or batch.depths_N is None:
                continue
            leaves_N = batch.depths_N == self._ends_B[k]
            self._repeat(*self._left_plain(leaves_N, torch.full_like(batch.slots_N, k), seen.slot_mapping_N))
            stays_K = (~leaves_N).nonzero()[:, 0]
            x_NM, at_N, batch = x_NM[stays_K], at_N[stays_K], batch.rows(stays_K)
            if not len(stays_K):
                break
        prefill_steps(self.parts, whole, left_NM, self.coda)

    def _pass(self, name: str, variant: SamplingVariant, output: StepOutput) -> None:
        parts, s, kind = self.parts, self.parts.state, self.numbers[name]
        layers, M = parts.layers, s.x_SM.shape[1]
        *found, table_NP, lengths_N = self._begin[kind](kind, variant.rows or parts.batch_size)
        rows = Rows(*found)
        if parts.idle(rows.valid_N):
            output.blank(s.spare)
            return
        planes = 1 if self.stride is None else 1 + self.last * self.stride.planes
        seen = AttentionMetadata(rows.slot_mapping_N, table_NP, lengths_N, planes=planes, slots_N=rows.slots_N)
        recursion_N = None if self.stride is None else rows.segment_N * self.stride.recursions
        none_N = torch.zeros_like(rows.slots_N)
        own = attention_for(s.tables_STP, rows.slots_N, none_N, rows.positions_N, rows.valid_N, parts.page_size)
        x_NM = rows.state_NM
        if kind in (0, ALL):
            x_NM = self._with_prelude(rows, x_NM, own)
        before_NM = x_NM[:, :M]
        x_NM = layers.run(x_NM, self.segments[max(kind, 0)], seen, rows.positions_N, recursion_N)
        state_NM = x_NM[:, :M].contiguous()
        read_NM = layers.run(state_NM, self.coda, own, rows.positions_N)
        scores_NV = self._scores(read_NM, rows.segment_N, kind)
        sure_N = self._decisions.confidence(AtExit(before_NM, state_NM, scores_NV, None, read_NM), rows, kind)
        self._settle(kind, rows, x_NM, sure_N, scores_NV, variant, output)

    def _with_prelude(self, rows: Rows, x_NM: Tensor, seen: AttentionMetadata) -> Tensor:
        """What rows enter their loops with; those in front of the first run the prelude, which the others have run."""
        layers, first_N = self.parts.layers, rows.segment_N == 0
        seen = replace(
            seen, slot_mapping_N=torch.where(first_N, seen.slot_mapping_N, -1),
            lengths_N=torch.where(first_N, seen.lengths_N, 0),
        )  # fmt: skip
        tokens_NM = layers.enter(self.parts.state.token_S.index_select(0, rows.slots_N))
        begun_NM = _begun(layers.run(tokens_NM, self.prelude, seen, rows.positions_N))
        return torch.where(first_N[:, None], begun_NM, x_NM)


def _begun(x_NM: Tensor) -> Tensor:
    """In front of the first loop: a state of zeros, and what the prelude made beside it."""
    return torch.cat((torch.zeros_like(x_NM), x_NM), dim=-1)
