"""Lossless speculation from the model's own exit, across a batch (thesis 2.2.2; self-speculative decoding).

What the exit chooses is a draft: the slot goes on behind it, and nothing is told. When a token does not exit, or as many
drafts wait as may, or one would end the sequence, all that waits runs the deeper segment in one pass, each a row. There the
full model chooses for every row, with the random number that belongs to the token's place in its sequence. Drafts that it
would not have chosen are dropped with all behind them. So a request's tokens are those that the full model chooses, greedy
or drawn, token by token, whatever was drafted and whenever drafting is switched off; in 16 bits up to near ties, since a
pass over a single row rounds otherwise than one over several.

A draft and the full model's choice are drawn with the same number, so they differ no more often than the two distributions
make them. A request with penalties or a constraint is never drafted for: what counts as repeated, or is allowed next, is
known only when a draft is verified.

Shapes: N rows, S slots, K places of a ring, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.decode.exiting import Threshold
from fathomlm.engine.device_state import IDLE
from fathomlm.engine.programs.base import (
    BAD,
    DRAFTED,
    ENDED,
    SLOT,
    VALID,
    ProgramContext,
    SamplingVariant,
    StepOutput,
    ends_sequence,
)
from fathomlm.engine.programs.exit_decisions import ALL, Rows
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.whole import begin_settled, metadata_of
from fathomlm.engine.sampler import Sampled
from fathomlm.engine.schedule import Placement


class DraftProgram(ExitProgram):
    settles_alone = False

    def __init__(
        self, parts: ProgramContext, exits: Sequence[int], *, stack: int = 16, shallows: int = 4, confidence: str = "gap"
    ) -> None:
        """One exit; at most `stack` tokens wait to be verified. A decode step is `shallows` passes that draft and one that
        verifies, where they cannot share one."""
        assert len(exits) == 1, "drafts come from one exit"
        super().__init__(parts, exits, stack=stack, shallows=shallows, confidence=confidence, waits=True)
        s = parts.state
        self.draft_SK = torch.zeros(s.slots + 1, self.stack, dtype=torch.int64, device=s.device)
        self.hold_S = torch.zeros(s.slots + 1, dtype=torch.bool, device=s.device)
        """The last draft would end the sequence: nothing more is drafted until it is verified."""
        self._draft = parts.small(self._draft_plain)
        self._verify = parts.small(self._verify_plain)
        self.settles = s.slots * self.stack <= parts.batch_size and not (self.mixed or parts.plan.injection)
        """Whether a step without drafts leaves nothing to verify: it has a pass for every segment, and rows for all that may
        wait."""
        self._slots_S = torch.arange(s.slots, device=s.device)
        self._depth_S = torch.full_like(self._slots_S, self.cuts[-1])
        self._unsure_S = torch.zeros(s.slots, device=s.device)
        self._angles = parts.layers.row_angles()
        self._begin_settled = parts.small(begin_settled)
        self._end_settled = parts.small(self._end_settled_plain)

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        super().place(placements, threshold)
        self.hold_S.index_fill_(0, self.parts.state.placed_K, False)

    def decode_step(self, variant: SamplingVariant) -> None:
        if variant.drafts or variant.only is not None:
            super().decode_step(variant)
            return
        if variant.settled:
            self._settled_step(variant)
            return
        self.output.blank(self.parts.state.spare)
        for name in dict.fromkeys(self.passes):
            self._pass(name, variant, self.output.part(self.passes.index(name), self.parts.batch_size))

    def _settled_step(self, variant: SamplingVariant) -> None:
        """A token of every slot through all layers, as without exits: drafting that does not pay must not cost anything
        where it is off. What exits need of their own is stored, lest it be missing when they are asked again."""
        parts, layers = self.parts, self.parts.layers
        slots_S = self._slots_S
        tokens_S, positions_S, live_S, *found = self._begin_settled(parts.state, slots_S, parts.page_size, self._angles)
        output = self.output.part(0, len(live_S))
        if parts.idle(live_S):
            output.blank(parts.state.spare)
            return
        seen = metadata_of(found, slots_N=slots_S)
        x_SM, alone = layers.enter(tokens_S), len(live_S) == 1
        for steps, own in zip(self.segments, (*self.own, ()), strict=True):
            x_SM = layers.run(x_SM, steps, seen, positions_S, spend=True, alone=alone)
            if own:
                layers.keep(x_SM, own, seen, positions_S)
        scores_SV = layers.scores(x_SM)
        self._choose(scores_SV, slots_S, live_S, self._depth_S, self._unsure_S, variant, output)
        self._end_settled(live_S)

    def _end_settled_plain(self, live_S: Tensor) -> None:
        """All positions up to the slots' own have run every segment."""
        s = self.parts.state
        self.filled_BS[:, :-1] = torch.where(live_S, s.position_S[:-1], self.filled_BS[:, :-1])
        s.clock.add_(1)

    def _overflows(self, segment_S: Tensor, pending_S: Tensor, size_S: Tensor) -> Tensor:
        """Drafts are verified also where there is no page for another: the host gives pages for what it knows of."""
        s = self.parts.state
        stuck_S = (pending_S > 0) & (self.hold_S | (s.position_S >= s.capacity_ST[:, 0]))
        return (pending_S + size_S > self.stack) | (stuck_S & (segment_S == 0))

    def _settle(
        self, kind: int, rows: Rows, x_NM: Tensor, sure_N: Tensor | None, scores_NV: Tensor, variant: SamplingVariant,
        output: StepOutput,
    ) -> None:  # fmt: skip
        s = self.parts.state
        exits_N, _, choice_N, confidence_N, _, judged_N = self._decisions.find_exits(scores_NV, sure_N, rows)
        index_N = (s.generated_S - s.position_S).index_select(0, rows.slots_N) + rows.positions_N
        if not variant.drafts:
            exits_N, judged_N = torch.zeros_like(exits_N), torch.zeros_like(judged_N)  # what was not asked is not judged
        elif variant.penalise or variant.bias:
            exits_N = exits_N & ~self.parts.sampler.penalises(rows.slots_N) & (s.held_S[rows.slots_N] == 0)
        wanted_N = exits_N | (rows.valid_N & (rows.segment_N == self.last))
        sampled = self._choose.sampled(scores_NV, rows.slots_N, index_N, wanted_N, variant)
        chosen_N = torch.zeros_like(exits_N)
        if kind != self.last:
            chosen_N = self._draft(rows, exits_N, sampled)
        output.blank(s.spare)
        output.ints_NC[:, SLOT].copy_(rows.slots_N)  # drafts tell nothing, but who ran
        if kind in (self.last, ALL):
            emits_N = self._verify(rows, sampled, index_N, confidence_N, judged_N, output)
            chosen_N = chosen_N | (rows.segment_N == self.last)
            self._choose.tell(sampled, rows.slots_N, emits_N, variant, output)
        self._end(rows, chosen_N, x_NM, choice_N, confidence_N)
        if kind in (self.last, ALL):
            self._forget_dropped()

    def _draft_plain(self, rows: Rows, exits_N: Tensor, sampled: Sampled) -> Tensor:
        """Rows that exit leave a draft, and their slots go on behind it."""
        s = self.parts.state
        drafts_N = exits_N & ~sampled.bad_N
        slots_N = torch.where(drafts_N, rows.slots_N, s.spare)
        self.draft_SK.index_put_((slots_N, rows.positions_N % self.stack), sampled.tokens_N)
        made_N = s.generated_S[slots_N] + 1
        self.hold_S.index_put_((slots_N,), self._ends(sampled.tokens_N, slots_N) | (made_N >= s.limit_S[slots_N]))
        s.token_S.index_put_((slots_N,), sampled.tokens_N)
        s.position_S.index_put_((slots_N,), rows.positions_N + 1)
        s.generated_S.index_put_((slots_N,), made_N)
        return drafts_N

    def _verify_plain(
        self, rows: Rows, sampled: Sampled, index_N: Tensor, confidence_N: Tensor, judged_N: Tensor, output: StepOutput
    ) -> Tensor:
        """What the full model chooses for each row; a slot's rows count up to the first that is no draft, or a wrong one."""
        s, tokens_N = self.parts.state, sampled.tokens_N
        here_N = rows.valid_N & (rows.segment_N == self.last)
        drafted_N = here_N & ~rows.current_N
        draft_N = self.draft_SK[rows.slots_N, rows.positions_N % self.stack]
        kept_N = drafted_N & (tokens_N == draft_N) & ~sampled.bad_N
        stops_N = (here_N & ~kept_N).long()
        before_N = stops_N.cumsum(0) - stops_N  # rows of a slot stand together, in order
        number_N = rows.positions_N - self.filled_BS[0][rows.slots_N]
        at_N = torch.arange(len(tokens_N), device=s.device)
        start_N = torch.where(here_N, at_N - number_N, at_N)
        emits_N = here_N & (before_N == before_N[start_N])
        over_N = self._ends(tokens_N, rows.slots_N) | (index_N + 1 >= s.limit_S[rows.slots_N]) | sampled.bad_N
        stops_N = emits_N & ~kept_N
        slots_N = torch.where(stops_N, rows.slots_N, s.spare)
        s.token_S.index_put_((slots_N,), tokens_N)
        s.position_S.index_put_((slots_N,), rows.positions_N + 1)
        s.generated_S.index_put_((slots_N,), index_N + 1)
        self.hold_S.index_put_((torch.where(here_N, rows.slots_N, s.spare),), torch.zeros_like(here_N))
        stays_N = emits_N & (over_N | (s.held_S[rows.slots_N] > 0))
        s.stage_S.index_put_((torch.where(stays_N, rows.slots_N, s.spare),), torch.full_like(tokens_N, IDLE))
        depth_N = torch.where(kept_N, self._ends_B[0], self._ends_B[1])
        flags_N = VALID + BAD * sampled.bad_N.long() + ENDED * over_N.long() + DRAFTED * drafted_N.long() + judged_N
        columns = (rows.slots_N, s.epoch_S[rows.slots_N], tokens_N, depth_N, flags_N * emits_N, index_N)
        output.ints_NC.copy_(torch.stack(columns, 1))
        output.floats_NC.copy_(torch.stack((sampled.logprobs_N, confidence_N), 1))
        return emits_N

    def _forget_dropped(self) -> None:
        """Of a slot that went back, no more positions have run the deeper segment than it has."""
        self.filled_BS.copy_(torch.minimum(self.filled_BS, self.parts.state.position_S))

    def _ends(self, tokens_N: Tensor, slots_N: Tensor) -> Tensor:
        return ends_sequence(tokens_N, self.parts.ends_E, self.parts.state.ignores_S[slots_N])
