"""Lossless speculation with a draft layer behind the model (EAGLE), across a batch. `decode.draft_layer` is the slow twin.

A decode step drafts and verifies for every slot. The draft layer runs over what was settled in the step before, each token
with the true last state of the one before it, and then over its own drafts with its own output; all layers then run over the
last settled token and the drafts behind it, each a row. There the full model chooses for every row, with the random number
that belongs to the token's place in its sequence, and rows count up to the first whose draft is another token. So tokens are
those that the full model chooses, greedy or drawn, one by one, whatever was drafted. Drafts are the layer's likeliest
tokens, never drawn: at temperature 0.8 such a draft is the full model's draw as often as one drawn with the same random
number, and costs no draw.

Where the state of a token before is not known, because its entries were found in the prefix cache, zeros stand in for it:
that may cost a draft, and no token. A request with penalties or a constraint is never drafted for (`programs.drafts`).

Shapes: S slots, J places of a slot (its last settled token and the drafts behind it), N = S x J rows, M hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.decode.confidence import MEASURES, AtExit
from fathomlm.decode.draft_layer import DEPTH
from fathomlm.decode.draft_tree import BestShape, TreeShape
from fathomlm.decode.exiting import Threshold
from fathomlm.engine.device_state import ENTER, IDLE, PrefillBatch
from fathomlm.engine.programs.base import (
    BAD,
    DRAFTED,
    ENDED,
    VALID,
    ProgramContext,
    SamplingVariant,
    SlotThresholds,
    StepOutput,
    TokenChooser,
    ends_sequence,
)
from fathomlm.engine.programs.draft_rows import DraftRows, SlotDrafts
from fathomlm.engine.programs.whole import begin_settled, count_entries, metadata_of, prefill_steps, rows_see
from fathomlm.engine.sampler import Sampled
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.kernels.few_rows import taking_few
from fathomlm.kernels.triton_here import EARLY_DRAFTS, FEW_DRAFTS, launching_early


class DraftLayerProgram:
    def __init__(self, parts: ProgramContext, *, drafts: int, confidence: str = "gap") -> None:
        """At most `drafts` tokens are drafted for each slot in a step."""
        s, plan = parts.state, parts.plan
        assert parts.batch_size == s.slots, "a slot has its rows"
        self.parts, self.drafts, self._measure = parts, drafts, confidence
        self._own = (plan.draft_step,)
        places = drafts + 1
        self.output = StepOutput.empty(s.slots * places, parts.sampler.max_logprobs, s.device)
        self._slots_S = torch.arange(s.slots, device=s.device)
        self._places_J = torch.arange(places, device=s.device)
        self._slots_N = self._slots_S.repeat_interleave(places)
        self.states_SJM = torch.zeros(s.slots + 1, places, s.x_SM.shape[1], dtype=s.x_SM.dtype, device=s.device)
        """The last states of the tokens before those that the draft layer has not run yet."""
        self.tokens_SJ = torch.zeros(s.slots + 1, places, dtype=torch.int64, device=s.device)
        """The tokens that it has not run, the slot's last one included."""
        self.count_S = torch.ones(s.slots + 1, dtype=torch.int64, device=s.device)
        """How many those are."""
        self._thresholds = SlotThresholds(s, 1)
        self.threshold_S = self._thresholds.of_SB[:, 0]
        self._angles = parts.layers.row_angles()
        self._begin = parts.small(self._begin_plain)
        self._enter = parts.small(parts.layers.decoder.enter_draft)
        self._meet = parts.small(self._meet_plain)
        self._rows = parts.small(self._rows_plain)
        self._verify = parts.small(self._verify_plain)
        self._choose = TokenChooser(parts)
        self._depth_S = torch.full_like(self._slots_S, plan.unrolled_layers)
        self._unsure_S = torch.zeros(s.slots, device=s.device)
        self._begin_settled = parts.small(self._begin_settled_plain)
        self._end_settled = parts.small(self._end_settled_plain)
        self._kernels = self._kernels_for(TreeShape((1,) * drafts), None)

    def _kernels_for(self, tree: TreeShape | BestShape, bits_J: Tensor | None) -> DraftRows | None:
        """What makes greedy steps, where that can be."""
        if self._measure != "gap":
            return None
        kept = SlotDrafts(self.states_SJM, self.tokens_SJ, self.count_S, self.threshold_S)
        return DraftRows.of(self.parts, kept, tree, bits_J)

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        s = self.parts.state
        slots_K = s.placed_K
        self.states_SJM.index_fill_(0, slots_K, 0)
        self.count_S.index_fill_(0, slots_K, 1)
        self.tokens_SJ[:, 0].index_copy_(0, slots_K, s.token_S.index_select(0, slots_K))
        self._thresholds.place(s, placements, threshold)

    def prefill(self, batch: PrefillBatch) -> None:
        """Known tokens through every step, for the sake of their states; the draft layer only stores its entries. The state
        of a chunk's last token waits in the slot's first place."""
        layers, slots_N = self.parts.layers, batch.slots_N
        x_NM, seen = prefill_steps(self.parts, batch, layers.enter(batch.tokens_N), self.parts.plan.steps)
        begins_N = torch.arange(len(slots_N), device=slots_N.device) == batch.starts_N
        before_NM = torch.where(begins_N[:, None], self.states_SJM[slots_N, 0], x_NM.roll(1, 0))
        read_NM = layers.decoder.enter_draft(batch.tokens_N, before_NM)
        layers.keep(read_NM, self._own, seen, batch.positions_N)
        ends_N = begins_N.roll(-1, 0)  # the first row of all begins a chunk, so the last one ends one
        self.states_SJM[:, 0].index_put_((torch.where(ends_N, slots_N, self.parts.state.spare),), x_NM)
        count_entries(self.parts.state, 0, slots_N)

    settles = True
    """Behind a step without drafts the draft layer has not run one token of each slot, and nothing waits to be verified. Of
    a slot that had no page just then it has not run several: it goes on behind the last of them."""

    def _settled_step(self, variant: SamplingVariant) -> None:
        """A token of every slot through all layers, as in a plain model; the draft layer only stores its entry."""
        parts, s, layers = self.parts, self.parts.state, self.parts.layers
        before_SM, tokens_S, positions_S, live_S, *found = self._begin_settled()
        output = self.output.part(0, len(live_S))
        if parts.idle(live_S):
            output.blank(s.spare)
            return
        seen = metadata_of(found, slots_N=self._slots_S)
        layers.keep(self._enter(tokens_S, before_SM), self._own, seen, positions_S)
        x_SM = layers.enter(tokens_S)
        x_SM = layers.run(x_SM, parts.plan.steps, seen, positions_S, spend=True, alone=len(live_S) == 1)
        self._choose(layers.scores(x_SM), self._slots_S, live_S, self._depth_S, self._unsure_S, variant, output)
        self._end_settled(live_S, x_SM)

    def _begin_settled_plain(self) -> tuple[Tensor, ...]:
        parts, slots_S = self.parts, self._slots_S
        before_SM = self.states_SJM[slots_S, self.count_S[:-1] - 1]
        return before_SM, *begin_settled(parts.state, slots_S, parts.page_size, self._angles)

    def _end_settled_plain(self, live_S: Tensor, x_SM: Tensor) -> None:
        s = self.parts.state
        self.states_SJM[:-1, 0] = torch.where(live_S[:, None], x_SM, self.states_SJM[:-1, 0])
        self.tokens_SJ[:-1, 0] = torch.where(live_S, s.token_S[:-1], self.tokens_SJ[:-1, 0])
        self.count_S[:-1] = torch.where(live_S, 1, self.count_S[:-1])
        s.clock.add_(1)

    def decode_step(self, variant: SamplingVariant) -> None:
        if variant.settled:
            self._settled_step(variant)
            return
        with launching_early(EARLY_DRAFTS), taking_few(FEW_DRAFTS):
            if self._kernels is not None and variant.drafts and self._kernels_serve(variant):
                self._kernels.step(variant, self.output)
            else:
                self._step(variant)

    @staticmethod
    def _kernels_serve(variant: SamplingVariant) -> bool:
        return not (variant.penalise or variant.bias or variant.alternatives)

    def _step(self, variant: SamplingVariant) -> None:
        parts, s, layers = self.parts, self.parts.state, self.parts.layers
        limited = variant.penalise or variant.bias
        live_S, room_S, asks_S, last_S, before_NM, tokens_N, positions_N, *found = self._begin(limited)
        if parts.idle(live_S):
            self.output.blank(s.spare)
            return
        read_NM, seen = self._enter(tokens_N, before_NM), metadata_of(found)
        many_S, drafts, sures = torch.zeros_like(room_S), list[Tensor](), list[Tensor]()
        if variant.drafts:
            x_NM = layers.run(read_NM, self._own, seen, positions_N, spend=True)
            many_S, drafts, sures = self._draft(x_NM.index_select(0, last_S), live_S, asks_S, room_S)
        else:
            layers.keep(read_NM, self._own, seen, positions_N)
        self._judge(live_S, many_S, drafts, sures, variant)
        s.clock.add_(1)

    def _draft(
        self, x_SM: Tensor, live_S: Tensor, asks_S: Tensor, room_S: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """How many drafts the slots have, behind the layer's output for their last tokens; these, and how sure it was."""
        many_S, drafts, sures = torch.zeros_like(room_S), list[Tensor](), list[Tensor]()
        found: list[Tensor] = []
        for number in range(self.drafts):
            if number:
                if self.parts.idle(asks_S):
                    break
                positions_S, *seen = found
                read_SM = self._enter(drafts[-1], x_SM)
                # A draft may be rounded as one row is.
                x_SM = self.parts.layers.run(read_SM, self._own, metadata_of(seen), positions_S, spend=True, alone=True)
            scores = self.parts.layers.draft_scores(x_SM)
            draft_S, sure_S, many_S, asks_S, *found = self._meet(*scores, x_SM, asks_S, many_S, room_S)
            drafts.append(draft_S)
            sures.append(sure_S)
        return many_S, drafts, sures

    def _judge(
        self, live_S: Tensor, many_S: Tensor, drafts: list[Tensor], sures: list[Tensor], variant: SamplingVariant
    ) -> None:
        """All layers over the last settled tokens and the drafts, and what is settled then."""
        s, layers = self.parts.state, self.parts.layers
        places = 1 + len(drafts) if variant.drafts else 1
        drafts_SJ = torch.stack((s.token_S[:-1], *drafts), 1)
        sures_SJ = torch.stack((*sures, torch.zeros_like(live_S, dtype=torch.float32)), 1)
        slots_N = self._slots_N if places == self.drafts + 1 else self._slots_S.repeat_interleave(places)
        valid_N, positions_N, index_N, *found = self._rows(live_S, many_S, slots_N, places)
        seen, x_NM = metadata_of(found), layers.enter(drafts_SJ.flatten())
        x_NM = layers.run(x_NM, self.parts.plan.steps, seen, positions_N, spend=True, alone=len(slots_N) == 1)
        scores_NV = layers.scores(x_NM)
        sampled = self._choose.sampled(scores_NV, slots_N, index_N, valid_N, variant)
        output = self.output if places == self.drafts + 1 else self.output.part(0, len(slots_N))
        if output is not self.output:
            self.output.blank(s.spare)
        self._settle(live_S, many_S, drafts_SJ, sures_SJ, valid_N, index_N, slots_N, sampled, x_NM, output, variant)

    def _settle(
        self, live_S: Tensor, many_S: Tensor, drafts_SJ: Tensor, sures_SJ: Tensor, valid_N: Tensor, index_N: Tensor,
        slots_N: Tensor, sampled: Sampled, x_NM: Tensor, output: StepOutput, variant: SamplingVariant,
    ) -> None:  # fmt: skip
        """What the full model chose along the drafts of each slot becomes its next tokens, as far as it may."""
        emits_N = self._verify(live_S, many_S, drafts_SJ, sures_SJ, valid_N, index_N, sampled, x_NM, output)
        self._choose.tell(sampled, slots_N, emits_N, variant, output)

    def _begin_plain(self, limited: bool) -> tuple[Tensor, ...]:
        """Who runs and how many drafts it may have; what the draft layer has to catch up with, a slot's places as rows."""
        s, slots_S = self.parts.state, self._slots_S
        position_S, capacity_S = s.position_S[:-1], s.capacity_ST[:-1, 0]
        live_S = (s.stage_S[:-1] == ENTER) & (position_S < capacity_S)
        room_S = torch.minimum(capacity_S - position_S, s.limit_S[:-1] - s.generated_S[:-1]) - 1
        if limited:
            room_S = torch.where(self.parts.sampler.penalises(slots_S) | (s.held_S[:-1] > 0), 0, room_S)
        count_S1 = self.count_S[:-1, None]
        valid_SJ = live_S[:, None] & (self._places_J < count_S1)
        positions_SJ = torch.where(valid_SJ, position_S[:, None] - count_S1 + 1 + self._places_J, 0)
        seen = self._seen(self._slots_N, positions_SJ.flatten(), valid_SJ.flatten())
        states_NM, tokens_N = self.states_SJM[:-1].flatten(0, 1), self.tokens_SJ[:-1].flatten()
        last_S = slots_S * len(self._places_J) + self.count_S[:-1] - 1
        return live_S, room_S, live_S & (room_S > 0), last_S, states_NM, tokens_N, positions_SJ.flatten(), *seen

    def _seen(
        self, slots_N: Tensor, ranks_N: Tensor, valid_N: Tensor, positions_N: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What `metadata_of` takes, for rows whose entries have these ranks, by default their positions."""
        positions_N = ranks_N if positions_N is None else positions_N
        parts = self.parts
        return rows_see(parts.state.tables_STP, slots_N, ranks_N, valid_N, parts.page_size, self._angles, positions_N)

    def _tree_seen(self, ranks_SB: Tensor, depths_SB: Tensor, bits_SB: Tensor, valid_SB: Tensor) -> tuple[Tensor, ...]:
        """Positions of rows whose entries are so many behind the last settled token's, and what `tree_metadata` takes. What
        is the same for every slot may come without that dimension."""
        s, slots_N = self.parts.state, self._slots_S.repeat_interleave(valid_SB.shape[1])
        ranks_N, positions_N = (
            torch.where(valid_SB, s.position_S[:-1, None] + by, 0).flatten() for by in (ranks_SB, depths_SB)
        )
        bits_N = bits_SB.expand_as(valid_SB).flatten()
        return positions_N, bits_N, *self._seen(slots_N, ranks_N, valid_SB.flatten(), positions_N)

    def _meet_plain(
        self, scores_SW: Tensor, vocab_W: Tensor | None, x_SM: Tensor, asks_S: Tensor, many_S: Tensor, room_S: Tensor
    ) -> tuple[Tensor, ...]:
        """The layer's token and how sure it is; where it is sure enough that is a draft, to be followed by another, and
        where that one stands."""
        best_S, sure_S = best_and_gap(scores_SW)
        best_S = best_S if vocab_W is None else vocab_W[best_S]
        sure_S, drafts_S = self._sure_enough(sure_S, scores_SW, x_SM, asks_S)
        many_S = many_S + drafts_S
        follows_S = drafts_S & (room_S > many_S)
        positions_S = torch.where(follows_S, self.parts.state.position_S[:-1] + many_S, 0)
        seen = self._seen(self._slots_S, positions_S, follows_S)
        return best_S, sure_S, many_S, follows_S, positions_S, *seen

    def _sure_enough(self, gap_N: Tensor, scores_NW: Tensor, x_NM: Tensor, asks: Tensor) -> tuple[Tensor, Tensor]:
        """How sure the layer is of what follows those that ask, (S) or (S, n), and where that is enough for a draft."""
        sure_N = gap_N if self._measure == "gap" else MEASURES[self._measure](AtExit(x_NM, x_NM, scores_NW))
        sure, threshold = sure_N.view_as(asks), self.threshold_S[:-1] if asks.ndim == 1 else self.threshold_S[:-1, None]
        return torch.where(asks, sure, 0.0).float(), asks & ((threshold == 0) | (sure > threshold))

    def _rows_plain(self, live_S: Tensor, many_S: Tensor, slots_N: Tensor, places: int) -> tuple[Tensor, ...]:
        s, place_J = self.parts.state, self._places_J[:places]
        valid_N = (live_S[:, None] & (place_J <= many_S[:, None])).flatten()
        positions_N = torch.where(valid_N, (s.position_S[:-1, None] + place_J).flatten(), 0)
        index_N = (s.generated_S[:-1, None] + place_J).flatten()
        return valid_N, positions_N, index_N, *self._seen(slots_N, positions_N, valid_N)

    def _verify_plain(
        self, live_S: Tensor, many_S: Tensor, drafts_SJ: Tensor, sures_SJ: Tensor, valid_N: Tensor, index_N: Tensor,
        sampled: Sampled, x_NM: Tensor, output: StepOutput,
    ) -> Tensor:  # fmt: skip
        """A slot's rows count up to the first whose draft is wrong, or that ends the sequence."""
        s, slots = self.parts.state, len(live_S)
        tokens_SJ, valid_SJ, bad_SJ, index_SJ = (
            each.view(slots, -1) for each in (sampled.tokens_N, valid_N, sampled.bad_N, index_N)
        )
        places = tokens_SJ.shape[1]
        place_J, slots_SJ = self._places_J[:places], self._slots_S[:, None].expand(-1, places)
        drafted_SJ = valid_SJ & (place_J < many_S[:, None])
        kept_SJ = drafted_SJ & (tokens_SJ == torch.roll(drafts_SJ, -1, 1)) & ~bad_SJ
        ends_SJ = ends_sequence(tokens_SJ.flatten(), self.parts.ends_E, s.ignores_S[slots_SJ.flatten()]).view(slots, -1)
        over_SJ = ends_SJ | (index_SJ + 1 >= s.limit_S[:-1, None]) | bad_SJ
        stops_SJ = (~kept_SJ | over_SJ).long()
        emits_SJ = valid_SJ & (stops_SJ.cumsum(1) - stops_SJ == 0)
        settled_S = emits_SJ.sum(1)
        last_S1 = (settled_S - 1).clamp_min(0)[:, None]
        token_S, over_S = tokens_SJ.gather(1, last_S1)[:, 0], over_SJ.gather(1, last_S1)[:, 0]
        idle_S = live_S & (over_S | (s.held_S[:-1] > 0))
        s.token_S[:-1] = torch.where(live_S, token_S, s.token_S[:-1])
        s.position_S[:-1] += settled_S
        s.generated_S[:-1] += settled_S
        s.stage_S[:-1] = torch.where(idle_S, IDLE, s.stage_S[:-1])
        self.count_S[:-1] = torch.where(live_S, settled_S, self.count_S[:-1])
        live_S1 = live_S[:, None]
        self.tokens_SJ[:-1, :places] = torch.where(live_S1, tokens_SJ, self.tokens_SJ[:-1, :places])
        states_SJM = x_NM.view(slots, places, -1)
        self.states_SJM[:-1, :places] = torch.where(live_S1[..., None], states_SJM, self.states_SJM[:-1, :places])
        depth_SJ = torch.where(kept_SJ, DEPTH, self.parts.plan.unrolled_layers)
        flags_SJ = VALID + BAD * bad_SJ.long() + ENDED * over_SJ.long() + DRAFTED * drafted_SJ.long()
        epoch_SJ = s.epoch_S[:-1, None].expand(-1, places)
        columns = (slots_SJ, epoch_SJ, tokens_SJ, depth_SJ, flags_SJ * emits_SJ, index_SJ)
        output.ints_NC.copy_(torch.stack([column.flatten() for column in columns], 1))
        output.floats_NC.copy_(torch.stack((sampled.logprobs_N, sures_SJ.flatten()), 1))
        return emits_SJ.flatten()
