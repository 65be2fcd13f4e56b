"""Every token runs every step: plain and recursive models, with continuous sequence batching (the baseline of every figure).
With a static exit every step up to that one: a shallow model.

A row is a slot: what is in slot n is row n. Slots that are empty, or that wait for pages, are holes. Where few are occupied,
fewer rows run, and those that have something to do are looked for first. Where there are more slots than rows, the sequences
that were placed first run, and the next one takes the row of one that ends at once: the host would hear of it some decode
steps later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.decode.exiting import Threshold
from fathomlm.depth import Step
from fathomlm.engine.device_state import ENTER, EngineState, PrefillBatch
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant, StepOutput, TokenChooser, pick
from fathomlm.engine.programs.whole_rows import WholeRows
from fathomlm.engine.schedule import Placement


class WholeProgram:
    def __init__(self, parts: ProgramContext, exit: int | None = None) -> None:
        """`exit` is the index of the step after which every token exits; None: none does."""
        assert parts.batch_size <= parts.state.slots, "every row has a slot"
        self.parts, plan = parts, parts.plan
        device = parts.state.device
        self.steps = plan.steps if exit is None else plan.steps[: exit + 1]
        self.own = () if exit is None else plan.exit_steps((exit,))
        self._exit = exit if exit is not None and parts.layers.decoder.has_exit_head(exit) else None
        self.output = StepOutput.empty(parts.batch_size, parts.sampler.max_logprobs, device)
        self._rows_N = torch.arange(parts.batch_size, device=device)
        depth = plan.recursions if exit is None else exit + 1  # counted in loops; in layers where tokens exit
        self._depth_N = torch.full((parts.batch_size,), depth, device=device)
        self._confidence_N = torch.zeros(parts.batch_size, device=device)
        self._begin, self._pick = parts.small(begin), parts.small(pick_live)
        self._angles = parts.layers.row_angles()
        self._choose = TokenChooser(parts)
        self._depth, self._few = depth, WholeRows.of(parts)

    def decode_step(self, variant: SamplingVariant) -> None:
        parts, s, N = self.parts, self.parts.state, variant.rows or self.parts.batch_size
        rows_N = self._rows_N if s.slots == N else self._pick(s.numbers_SC, s.entries_ST, s.capacity_ST, N)
        if self._few is not None and variant.greedy:
            x_NM, positions_N, live_N, seen = self._few.begin(rows_N)
            scores_NV = self._scores(x_NM, positions_N, seen)
            self._few.settle(scores_NV, rows_N, live_N, self._depth, self.output.part(0, N))
            return
        tokens_N, positions_N, live_N, *found = self._begin(
            s.numbers_SC, s.entries_ST, s.capacity_ST, s.tables_STP, rows_N, parts.page_size, self._angles
        )
        scores_NV = self._scores(parts.layers.enter(tokens_N), positions_N, metadata_of(found, slots_N=rows_N))
        output = self.output.part(0, N)
        self._choose(scores_NV, rows_N, live_N, self._depth_N[:N], self._confidence_N[:N], variant, output)

    def _scores(self, x_NM: Tensor, positions_N: Tensor, seen: AttentionMetadata) -> Tensor:
        """From what rows enter the layers with, which nobody needs afterwards."""
        layers = self.parts.layers
        x_NM = layers.run(x_NM, self.steps, seen, positions_N, spend=True)
        if self.own:
            x_NM = layers.run(x_NM, self.own, seen, positions_N)
        return layers.scores(x_NM, self._exit)

    def prefill(self, batch: PrefillBatch) -> None:
        """Known tokens through every step that stores entries: what comes behind the last of those (loops that share the
        first one's) only the token runs whose logits choose, and that one is not among them. An exit's own layer only
        stores."""
        parts, plan = self.parts, self.parts.plan
        stores = len(self.steps) if self.own else 1 + max(step.index for step in self.steps if not plan.reads_kv(step))
        x_NM, seen = prefill_steps(parts, batch, parts.layers.enter(batch.tokens_N), self.steps[:stores])
        if self.own:
            parts.layers.keep(x_NM, self.own, seen, batch.positions_N)
        count_entries(parts.state, 0, batch.slots_N)

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        """Slots have nothing of their own here."""


def prefill_steps(
    parts: ProgramContext, batch: PrefillBatch, x_NM: Tensor, steps: Sequence[Step]
) -> tuple[Tensor, AttentionMetadata]:
    """Steps that every token runs, with entries in the first table; and what the tokens see there. Rows of the spare slot
    stand for nothing."""
    slots_N, positions_N = batch.slots_N, batch.positions_N
    none_N, valid_N = torch.zeros_like(slots_N), slots_N != parts.state.spare
    seen = attention_for(parts.state.tables_STP, slots_N, none_N, positions_N, valid_N, parts.page_size, together=True)
    return parts.layers.run(x_NM, steps, seen, positions_N), seen


def count_entries(state: EngineState, table: int, slots_N: Tensor) -> None:
    """One more in a table for each row; none for rows that stand for nothing."""
    state.entries_ST[:, table].index_add_(0, slots_N, (slots_N != state.spare).long())


def pick_live(numbers_SC: Tensor, entries_ST: Tensor, capacity_ST: Tensor, many: int) -> Tensor:
    """The slots that have something to run, or the `many` of them whose sequences came first."""
    stage_S, since_S = numbers_SC[:, 2], numbers_SC[:, 3]
    return pick((stage_S == ENTER) & (entries_ST[:, 0] < capacity_ST[:, 0]), since_S, many)


def begin(
    numbers_SC: Tensor, entries_ST: Tensor, capacity_ST: Tensor, tables_STP: Tensor, rows_N: Tensor, page_size: int,
    angles: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Who runs, where, and what they see, with the `angles` of their positions; their entry counts as made. Rows are of
    different slots, but for the spare one."""
    token, position, stage = numbers_SC.index_select(0, rows_N)[:, :3].unbind(1)
    ranks_N = entries_ST[rows_N, 0]
    live_N = (stage == ENTER) & (ranks_N < capacity_ST[rows_N, 0])
    # Nothing is added up, for which a compiler would call a library: rows of the spare slot all store the same number.
    entries_ST.index_put_((rows_N, torch.zeros_like(rows_N)), ranks_N + live_N.long())
    positions_N = torch.where(live_N, position, 0)
    return token, positions_N, live_N, *rows_see(tables_STP, rows_N, ranks_N, live_N, page_size, angles, positions_N)


def begin_settled(
    state: EngineState, slots_S: Tensor, page_size: int, angles: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """The same for every slot of a program with drafts, of which none waits to be verified."""
    position_S = state.position_S[:-1]
    live_S = (state.stage_S[:-1] == ENTER) & (position_S < state.capacity_ST[:-1, 0])
    positions_S = torch.where(live_S, position_S, 0)
    seen = rows_see(state.tables_STP, slots_S, positions_S, live_S, page_size, angles, positions_S)
    return state.token_S[:-1], positions_S, live_S, *seen


def rows_see(
    tables_STP: Tensor, slots_N: Tensor, ranks_N: Tensor, valid_N: Tensor, page_size: int, angles: tuple[Tensor, ...],
    positions_N: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `metadata_of` takes, for rows whose entries have these ranks: with the angles of their positions, where kernels
    want them, lest each pass look them up."""
    seen = attention_for(tables_STP, slots_N, torch.zeros_like(slots_N), ranks_N, valid_N, page_size)
    turned = tuple(table_PD.index_select(0, positions_N) for table_PD in angles)
    return seen.slot_mapping_N, seen.table_NP, seen.lengths_N, *turned


def metadata_of(found: Sequence[Tensor], slots_N: Tensor | None = None) -> AttentionMetadata:
    """From `rows_see`. `slots_N`: rows are of different sequences, in these slots."""
    slot_mapping_N, table_NP, lengths_N, *angles = found
    known = (angles[0], angles[1]) if angles else None
    return AttentionMetadata(slot_mapping_N, table_NP, lengths_N, angles=known, slots_N=slots_N)
