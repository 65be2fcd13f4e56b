"""Leaving early across a batch: shallow-deep models (FREE, thesis 2.5.2) and recursive ones left after a recursion (3.3.5).

A slot has at most one token in front of the exit. Tokens that left wait in its ring with the state they left with; when
one does not leave, or the ring is full, all of them run the deeper steps together, each a row, and get their exact entries
there.
With shared entries nothing waits: deeper steps have none of their own. With `copies` deeper entries are made at once from
the state that left (CALM's state copying), which is not exact.

    ENTER    the slot's token is to run up to the exit
    DEEP     it did not leave: it and all that wait run on, and it is chosen there
    FLUSH    the ring is full: all that wait run on, and nothing is chosen

Where the steps behind the exit are the same layers as those in front (two loops of one block), rows of both share a pass;
elsewhere a decode step is some passes in front of the exit and one behind it.

Shapes: N rows, S slots, K places of a ring, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.engine.device_state import ENTER, IDLE, PrefillBatch
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import (
    AGREED,
    JUDGED,
    ProgramContext,
    SamplingVariant,
    StepOutput,
    TokenChooser,
    pick_groups,
)
from fathomlm.engine.programs.whole import prefill_whole
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.model.route.routers import draw

DEEP, FLUSH = 1, 2


class On(NamedTuple):
    """From a step in front of the exit to the one in its place behind it."""

    recursions: int
    planes: int
    """0 where both look at the same entries."""


class ExitProgram:
    def __init__(
        self,
        parts: ProgramContext,
        exit_layer: int,
        *,
        stack: int = 16,
        copies: bool = False,
        shallows: int = 1,
        forced: float | None = None,
    ) -> None:
        """`exit_layer` is where tokens leave, from 1; `stack` how many may wait; `shallows` how many passes in front of the
        exit come to one behind it, where they cannot share. `forced` is the part of the tokens that leaves, drawn and not
        decided, for measurements."""
        assert 1 <= stack <= parts.batch_size, "what waits in a slot must fit into a pass"
        s, plan = parts.state, parts.plan
        self.parts, self.exit = parts, exit_layer - 1
        self.copies, self.forced = copies, forced
        self.shallow, self.deep = plan.steps[:exit_layer], plan.steps[exit_layer:]
        self.on = _on(parts, self.shallow, self.deep)
        self._makes = any(not plan.reads_kv(step) for step in self.deep)
        self._waits = self._makes and not copies
        self.stack = stack if self._waits else 1
        self.passes = ("both",) if self.mixed else (*["shallow"] * shallows, "deep")
        self.output = StepOutput.empty(parts.batch_size * len(self.passes), parts.sampler.max_logprobs, s.device)
        self.ring_SKM = torch.zeros(s.slots + 1, self.stack, s.x_SM.shape[1], dtype=s.x_SM.dtype, device=s.device)
        self.pending_S, self.filled_S = (torch.zeros(s.slots + 1, dtype=torch.int64, device=s.device) for _ in range(2))
        self.threshold_S = torch.ones(s.slots + 1, device=s.device)
        # Beside the states that wait: what the exit chose for each, and how sure it was.
        self.choice_SK = torch.zeros(s.slots + 1, self.stack, dtype=torch.int64, device=s.device)
        self.confidence_SK = torch.zeros(s.slots + 1, self.stack, device=s.device)
        decoder = parts.layers.decoder
        own = (decoder.exit_adapters, decoder.exit_heads)
        self._own_head = any(str(self.exit) in mine for mine in own)
        self._begin = {kind: parts.small(self._begin_plain) for kind in ("both", "shallow", "deep")}
        self._end = parts.small(self._end_plain)
        self._find_exits = parts.small(self._exit_plain)
        self._choose = TokenChooser(parts)

    @property
    def mixed(self) -> bool:
        """Whether rows in front of the exit and behind it share a pass."""
        return self.on is not None

    def place(self, placements: Sequence[Placement], threshold: float) -> None:
        s = self.parts.state
        slots_K = s.upload([placement.slot for placement in placements])
        self.pending_S.index_fill_(0, slots_K, 0)
        self.filled_S.index_copy_(0, slots_K, s.upload([placement.sequence.length - 1 for placement in placements]))
        own = (placement.sequence.request.exit_threshold for placement in placements)
        thresholds_K = s.upload([threshold if one is None else one for one in own], torch.float32)
        self.threshold_S.index_copy_(0, slots_K, thresholds_K)

    def decode_step(self, variant: SamplingVariant) -> None:
        for number, kind in enumerate(self.passes):
            self._pass(kind, variant, self.output.part(number, self.parts.batch_size))

    def prefill(self, batch: PrefillBatch) -> None:
        prefill_whole(self.parts, batch)

    def _pass(self, kind: str, variant: SamplingVariant, output: StepOutput) -> None:
        layers, s = self.parts.layers, self.parts.state
        rows_N, deep_N, last_N, valid_N, tokens_N, positions_N, waiting_NM, *found = self._begin[kind](kind)
        if self.parts.idle(valid_N):
            output.blank(s.spare)
            return
        seen = AttentionMetadata(*found, planes=1 if self.on is None else 1 + self.on.planes)
        if kind == "deep":
            x_NM = layers.run(waiting_NM, self.deep, seen, positions_N)
        else:
            x_NM = torch.where(deep_N[:, None], waiting_NM, layers.enter(tokens_N))
            recursion_N = None if self.on is None else deep_N.long() * self.on.recursions
            x_NM = layers.run(x_NM, self.shallow, seen, positions_N, recursion_N)
        scores_NV = self._scores(x_NM, deep_N, kind)
        exits_N, chosen_N, choice_N, confidence_N, depth_N, flags_N = self._find_exits(
            scores_NV, rows_N, deep_N, last_N, valid_N, positions_N
        )
        if self.copies and kind != "deep":
            self._copy_entries(x_NM, exits_N, seen, positions_N)
        self._choose(scores_NV, rows_N, chosen_N, depth_N, confidence_N, variant, output, flags_N)
        self._end(rows_N, deep_N, last_N, valid_N, exits_N, positions_N, x_NM, choice_N, confidence_N)
        s.clock.add_(1)

    def _scores(self, x_NM: Tensor, deep_N: Tensor, kind: str) -> Tensor:
        layers = self.parts.layers
        if kind == "deep" or (kind == "both" and not self._own_head):
            return layers.scores(x_NM)
        exit_NV = layers.scores(x_NM, self.exit if self._own_head else None)
        return exit_NV if kind == "shallow" else torch.where(deep_N[:, None], layers.scores(x_NM), exit_NV)

    def _begin_plain(self, kind: str) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        deep_S = (s.stage_S == DEEP) | (s.stage_S == FLUSH)
        shallow_S = (s.stage_S == ENTER) & (s.position_S < s.capacity_ST[:, 0])
        waits_S = {"both": deep_S | shallow_S, "shallow": shallow_S, "deep": deep_S}[kind]
        sizes_S = torch.where(deep_S, self.pending_S, 1)
        rows_N, number_N, valid_N = pick_groups(waits_S, s.since_S, sizes_S, parts.batch_size)
        deep_N = deep_S[rows_N] & valid_N
        last_N = valid_N & (number_N == sizes_S[rows_N] - 1)
        positions_N = torch.where(deep_N, self.filled_S[rows_N] + number_N, s.position_S[rows_N])
        positions_N = torch.where(valid_N, positions_N, 0)
        waiting_NM = self.ring_SKM[rows_N, positions_N % self.stack]
        writes_N, offset_N = None, None
        if self.on is not None:
            offset_N = deep_N.long() * self.on.planes * parts.layers.pages.stride(0)
            writes_N = None if self._makes else ~deep_N
        none_N = torch.zeros_like(rows_N)
        seen = attention_for(s.tables_STP, rows_N, none_N, positions_N, valid_N, parts.page_size, writes_N, offset_N)
        found = (seen.slot_mapping_N, seen.table_NP, seen.lengths_N)
        return rows_N, deep_N, last_N, valid_N, s.token_S[rows_N], positions_N, waiting_NM, *found

    def _exit_plain(
        self, scores_NV: Tensor, rows_N: Tensor, deep_N: Tensor, last_N: Tensor, valid_N: Tensor, positions_N: Tensor
    ) -> tuple[Tensor, ...]:
        """Who leaves, who is chosen, what the exit chose and how sure it was, after how many layers, and whether the last
        layer would have chosen the same."""
        s = self.parts.state
        choice_N, confidence_N = best_and_gap(scores_NV)
        at = (rows_N, positions_N % self.stack)
        judged_N = deep_N & (choice_N == self.choice_SK[at])
        # Where nothing waits a token that left is never judged, and those that did not say nothing of it: no flags.
        flags_N = (deep_N.long() * JUDGED + judged_N.long() * AGREED) * self._waits
        choice_N = torch.where(deep_N, self.choice_SK[at], choice_N)
        confidence_N = torch.where(deep_N, self.confidence_SK[at], confidence_N)
        threshold_N = self.threshold_S[rows_N]
        above_N = (threshold_N == 0) | (confidence_N > threshold_N)
        if self.forced is not None:
            above_N = draw(s.position_S[rows_N] + 7919 * s.epoch_S[rows_N], 0) < self.forced
        exits_N = valid_N & ~deep_N & above_N
        chosen_N = exits_N | (deep_N & last_N & (s.stage_S[rows_N] == DEEP))
        layers = (self.exit + 1, self.parts.plan.unrolled_layers)
        return exits_N, chosen_N, choice_N, confidence_N, torch.where(deep_N, layers[1], layers[0]), flags_N

    def _copy_entries(self, x_NM: Tensor, exits_N: Tensor, seen: AttentionMetadata, positions_N: Tensor) -> None:
        """Rows that leave are in front of the exit, so their page numbers are those of a step's own plane."""
        slots_N, lengths_N = torch.where(exits_N, seen.slot_mapping_N, -1), torch.where(exits_N, seen.lengths_N, 0)
        self.parts.layers.keep(x_NM, self.deep, AttentionMetadata(slots_N, seen.table_NP, lengths_N), positions_N)

    def _end_plain(
        self, rows_N: Tensor, deep_N: Tensor, last_N: Tensor, valid_N: Tensor, exits_N: Tensor, positions_N: Tensor,
        x_NM: Tensor, choice_N: Tensor, confidence_N: Tensor,
    ) -> None:  # fmt: skip
        """One row speaks for each slot: the token in front of the exit, or the last of those that ran behind it."""
        s = self.parts.state
        speaks_N = last_N & valid_N
        rows_N = torch.where(speaks_N, rows_N, s.spare)
        stage_N, pending_N = s.stage_S[rows_N], self.pending_S[rows_N]
        stays_N = ~exits_N if not self._waits else torch.ones_like(exits_N)
        at = (rows_N, positions_N % self.stack)
        self.ring_SKM.index_put_(at, torch.where(deep_N[:, None], self.ring_SKM[at], x_NM))
        self.choice_SK.index_put_(at, choice_N)
        self.confidence_SK.index_put_(at, confidence_N)
        filled_N = torch.where(deep_N, positions_N + 1, torch.where(stays_N, self.filled_S[rows_N], positions_N + 1))
        pending_N = torch.where(deep_N, 0, torch.where(stays_N, pending_N + 1, 0))
        full_N = pending_N >= self.stack
        after_exit_N = torch.where(exits_N, torch.where(full_N & stays_N, FLUSH, ENTER), DEEP)
        next_N = torch.where(deep_N, ENTER, after_exit_N)
        over_N = stage_N == IDLE
        s.stage_S.index_copy_(0, rows_N, torch.where(over_N | ~speaks_N, IDLE, next_N))
        self.filled_S.index_copy_(0, rows_N, filled_N)
        self.pending_S.index_copy_(0, rows_N, pending_N)
        s.since_S.index_copy_(0, rows_N, s.clock.expand_as(rows_N))


def _on(parts: ProgramContext, shallow: Sequence[Step], deep: Sequence[Step]) -> On | None:
    """How far on the steps behind the exit are, where rows of both can share a pass: the layers are the same in the same
    order, and one number of recursions and one of planes lead from each step to its twin."""
    if [step.layer for step in shallow] != [step.layer for step in deep]:
        return None
    recursions = {twin.recursion - step.recursion for step, twin in zip(shallow, deep, strict=True)}
    planes = parts.layout.shift(shallow, deep)
    reads = {parts.plan.reads_kv(step) for step in deep}
    if len(recursions) != 1 or planes is None or reads != {planes == 0}:
        return None
    return On(recursions.pop(), planes)
