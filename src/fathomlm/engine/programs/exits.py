"""Exiting early across a batch: shallow-deep models (FREE, thesis 2.5.2), recursive ones after a recursion (3.3.5).

Exits cut the plan into segments: segment 0 ends at the first exit, the last one with the last layer. A slot has one current
token, whose next segment is its level. Tokens that exited wait at the segment that they run next, in a ring with the state
they exited with. When a token runs a segment, all that wait there run it with it, each a row, and get their exact entries;
when a ring is full, those that wait in it run on alone. So every segment sees the positions in order. Who exits is for
`exit_decisions` to say.

Behind the last segment that makes entries of its own (`deepest`) nobody waits: with a shared KV cache none do. With `copies`
deeper entries are there at once, which is not exact: made of the state that exited (CALM's state copying), or those of the
last loop that ran, once more for each deeper one. A sequence that is preempted is then read again as it was: each token
leaves where it left before.

Where all segments are the same layers (loops of one block), rows of all of them share a pass; elsewhere a decode step is
some passes of segment 0 and one of each other.

Shapes: N rows, S slots, B segments but the first, K places of a ring, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fathomlm.decode.confidence import AtExit
from fathomlm.decode.exiting import Threshold
from fathomlm.depth import Step
from fathomlm.engine.device_state import ENTER, PrefillBatch
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import (
    FLAGS,
    NEXT,
    SLOT,
    WAITING,
    ProgramContext,
    SamplingVariant,
    SlotThresholds,
    StepOutput,
    TokenChooser,
    pick,
    pick_groups,
)
from fathomlm.engine.programs.exit_decisions import ALL, ExitDecisions, Rows
from fathomlm.engine.programs.lone_rows import LoneRows, SlotExits
from fathomlm.engine.programs.whole import count_entries, prefill_steps
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.few_rows import taking_few
from fathomlm.kernels.triton_here import EARLY_DRAFTS, FEW_DRAFTS, launching_early

Copies = Literal["state", "entries"]
EARLY_DEEP = False
"""Whether the deep passes of one sequence, which have some rows, are launched as passes that draft are: each kernel on its
way before the one in front of it has ended, and products made for few rows. Not measured yet: off."""


class ExitProgram:
    def __init__(
        self,
        parts: ProgramContext,
        exits: Sequence[int],
        *,
        stack: int = 16,
        copies: Copies | None = None,
        shallows: int = 1,
        forced: float | None = None,
        confidence: str = "gap",
        decay: float | None = None,
        waits: bool = False,
    ) -> None:
        """`exits` are the indices of the steps after which tokens exit; `stack` is how many may wait at a segment;
        `shallows` how many passes of segment 0 come to one of each other, where they cannot share. `forced` is the part of
        the tokens at an exit that exits there, drawn and not decided, for measurements. `decay` is that of `Exiting`. With
        `waits` tokens wait for every segment, also for those that make no entries."""
        assert 1 <= stack <= parts.batch_size, "what waits in a slot must fit into a pass"
        s, plan = parts.state, parts.plan
        self.parts, self.exits, self.copies = parts, tuple(exits), copies
        self.cuts = [*(index + 1 for index in exits), plan.unrolled_layers]
        """How many layers a token has run behind each segment."""
        self.segments = self._segments()
        self.last = len(exits)
        self.own = [plan.exit_steps((index,)) for index in exits]
        makes = [k for k, steps in enumerate(self.segments) if any(not plan.reads_kv(step) for step in steps)]
        self.deepest = self.last if waits else 0 if copies else max(makes)
        self._stored = max(*makes, *(k for k, own in enumerate(self.own) if own), 0)
        self.stride = None if any(self.own) or parts.layers.merged else parts.layout.stride(plan, self.segments)
        self._judges = self.deepest == self.last
        """Whether every token runs the last segment in the end, and so tells what exits would have chosen rightly."""
        self.stack = stack if self.deepest else 1
        middle = (f"middle {k}" for k in range(1, self.last))
        self.passes = ("both",) if self.mixed else (*["shallow"] * shallows, *middle, "deep")
        self.numbers = {"both": ALL, "shallow": 0, "deep": self.last} | {f"middle {k}": k for k in range(1, self.last)}
        """By the name of a forward pass: the segment that it runs."""
        self.output = StepOutput.empty(parts.batch_size * len(self.passes), parts.sampler.max_logprobs, s.device)
        ring = (self.last, s.slots + 1, self.stack)
        self.ring_BSKM = torch.zeros(*ring, self.streams * s.x_SM.shape[1], dtype=s.x_SM.dtype, device=s.device)
        self.level_S = torch.zeros(s.slots + 1, dtype=torch.int64, device=s.device)
        self.filled_BS = torch.zeros(self.last, s.slots + 1, dtype=torch.int64, device=s.device)
        """How many positions have run each segment; of those up to `deepest`."""
        self._thresholds = SlotThresholds(s, self.last)
        self.threshold_SB = self._thresholds.of_SB
        # What the last exit that a token met chose for it, and how sure it was: for every token on its way.
        self.places = self.last * self.stack
        self.choice_SK = torch.zeros(s.slots + 1, self.places, dtype=torch.int64, device=s.device)
        self.confidence_SK = torch.zeros(s.slots + 1, self.places, device=s.device)
        self._recursion_B = torch.tensor([steps[-1].recursion for steps in self.segments], device=s.device)
        loops = [[parts.layout.home(step)[1] for step in plan.recursion_steps(r)] for r in range(plan.recursions)]
        self._planes_RL = torch.tensor(loops if copies == "entries" else [], device=s.device)
        vocab = parts.layers.architecture.vocab if confidence == "kl" else 0
        self.scores_SV = torch.zeros(s.slots + 1, vocab, device=s.device)
        """What the last exit that a slot's token met made of it, where that is compared."""
        self._own_heads = [index for index in exits if parts.layers.decoder.has_exit_head(index)]
        kept = SlotExits(
            self.ring_BSKM, self.level_S, self.filled_BS, self.threshold_SB, self.choice_SK, self.confidence_SK, self.cuts
        )
        self._decisions = ExitDecisions(
            parts, exits, kept, self.scores_SV, confidence=confidence, judges=self._judges, decay=decay, forced=forced
        )
        self._ends_B = self._decisions.ends_B
        self._begin = {self.numbers[name]: parts.small(self._begin_plain) for name in self.passes}
        self._end = parts.small(self._end_plain)
        self._tell = parts.small(self._tell_plain)
        self._enter = parts.small(self._enter_plain)
        self._left = parts.small(self._left_plain)
        self._repeat = partial(parts.layers.pages.repeat, 0, self._planes_RL)
        self._choose = TokenChooser(parts)
        exact = self.last == self.deepest == 1 and not self.mixed and copies is None
        plain = confidence == "gap" and forced is None and decay is None
        self._lone = LoneRows.of(parts, kept) if self.settles_alone and exact and plain else None

    streams = 1
    """How many vectors a token carries from one segment to the next."""
    settles_alone = True
    """Whether a pass that the host has chosen may go its own way for a single sequence. A shallow pass then has one row at
    every time, and may round as one row does; what is drafted has to be rounded as what is not."""

    def _segments(self) -> list[tuple[Step, ...]]:
        return [self.parts.plan.steps[first:end] for first, end in pairwise((0, *self.cuts))]

    @property
    def mixed(self) -> bool:
        """Whether rows of all segments share a pass."""
        return self.stride is not None

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        s = self.parts.state
        slots_K = s.placed_K
        self.level_S.index_fill_(0, slots_K, 0)
        self.filled_BS.index_copy_(1, slots_K, s.position_S.index_select(0, slots_K).expand(self.last, -1))
        self._thresholds.place(s, placements, threshold)

    @property
    def chooses(self) -> bool:
        """Whether the host may choose which pass comes next. A captured decode step cannot ask whether its deep pass has
        anything to do; with one sequence the host knows."""
        return self.last == 1 and not self.mixed

    def pass_for(self, segment: int, waiting: int) -> tuple[str, int]:
        """The pass of a segment, and rows for so many: a few sizes, since each is captured. One row is no quicker than four,
        which round alike."""
        if segment == 0:
            return "shallow", 1
        return "deep", next((rows for rows in (4, 16, 64) if waiting <= rows < self.stack), self.stack)

    def decode_step(self, variant: SamplingVariant) -> None:
        if variant.only is not None:
            assert variant.rows is not None
            output = self.output.part(0, variant.rows)
            if self._lone is not None and variant.greedy and variant.drafts:
                self._lone_pass(self._lone, self.numbers[variant.only], variant.rows, output)
                return
            self._pass(variant.only, variant, output)
            self._tell(output.ints_NC)
            return
        for number, name in enumerate(self.passes):
            self._pass(name, variant, self.output.part(number, self.parts.batch_size))

    def prefill(self, batch: PrefillBatch) -> None:
        """Known tokens through every segment up to the last that stores entries. Nothing is chosen there, so the exits' own
        layers only store theirs."""
        layers = self.parts.layers
        x_NM = layers.enter(batch.tokens_N)
        count_entries(self.parts.state, 0, batch.slots_N)
        for k, steps in enumerate(self.segments[: self._stored + 1]):
            x_NM, seen = prefill_steps(self.parts, batch, x_NM, steps)
            if k < self.last and self.own[k]:
                layers.keep(x_NM, self.own[k], seen, batch.positions_N)
            if k < self.last and batch.depths_N is not None:
                leaves_N = batch.depths_N == self._ends_B[k]
                here_N = torch.full_like(batch.slots_N, k)
                if self.copies == "entries":
                    self._repeat(*self._left_plain(leaves_N, here_N, seen.slot_mapping_N))
                else:
                    self._copy_states(x_NM, leaves_N, here_N, batch.slots_N, batch.positions_N, [k])
                stays_K = (~leaves_N).nonzero()[:, 0]
                x_NM, batch = x_NM[stays_K], batch.rows(stays_K)
                if not len(stays_K):
                    return

    def _lone_pass(self, lone: LoneRows, kind: int, many: int, output: StepOutput) -> None:
        """A pass of one sequence, in fewer kernels; what it tells says what comes next."""
        with launching_early(EARLY_DRAFTS if EARLY_DEEP else 0), taking_few(EARLY_DEEP and FEW_DRAFTS):
            layers, rows = self.parts.layers, lone.begin(kind, many)
            seen, positions_N, alone = rows.attention, rows.positions_N, kind == 0
            x_NM = layers.run(rows.x_NM, self.segments[kind], seen, positions_N, spend=True, alone=alone)
            own = self.own[kind] if kind < self.last else ()
            read_NM = layers.run(x_NM, own, seen, positions_N, alone=alone) if own else x_NM
            lone.settle(kind, rows, x_NM, self._scores(read_NM, rows.slots_N, kind), output)

    def _pass(self, name: str, variant: SamplingVariant, output: StepOutput) -> None:
        layers, s, kind = self.parts.layers, self.parts.state, self.numbers[name]
        *found, table_NP, lengths_N = self._begin[kind](kind, variant.rows or self.parts.batch_size)
        rows = Rows(*found)
        if self.parts.idle(rows.valid_N):
            output.blank(s.spare)
            return
        planes = 1 if self.stride is None else 1 + self.last * self.stride.planes
        x_NM, recursion_N, *angles = self._enter(rows, kind)
        seen = AttentionMetadata(
            rows.slot_mapping_N, table_NP, lengths_N, planes=planes, angles=(angles[0], angles[1]), slots_N=rows.slots_N
        )
        steps = self.segments[max(kind, 0)]
        before_NM, alone = x_NM, self.settles_alone and variant.only is not None and kind == 0
        compares = self._decisions.measure == "state"
        if compares and self.copies != "entries":  # what the exit's layer alone has changed
            before_NM = x_NM = layers.run(x_NM, steps[:-1], seen, rows.positions_N, recursion_N, alone=alone)
            steps = steps[-1:]
        x_NM = layers.run(x_NM, steps, seen, rows.positions_N, recursion_N, spend=not compares, alone=alone)
        if 0 <= kind < self.last and not variant.drafts:
            self._pass_by(kind, rows, x_NM, seen, output)
        else:
            read_NM = x_NM
            if 0 <= kind < self.last and self.own[kind]:
                read_NM = layers.run(x_NM, self.own[kind], seen, rows.positions_N, alone=alone)
            scores_NV = self._scores(read_NM, rows.segment_N, kind)
            sure_N = self._decisions.confidence(AtExit(before_NM, x_NM, scores_NV, None, read_NM), rows, kind)
            self._settle(kind, rows, x_NM, sure_N, scores_NV, variant, output)

    def _enter_plain(self, rows: Rows, kind: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """What rows enter the layers with, how many recursions on they are where they share a pass, and the angles of their
        positions."""
        s, layers, x_NM = self.parts.state, self.parts.layers, rows.state_NM
        if kind in (0, ALL):
            tokens_NM = layers.enter(s.token_S.index_select(0, rows.slots_N))
            x_NM = torch.where((rows.segment_N == 0)[:, None], tokens_NM, x_NM)
        cos_PD, sin_PD = layers.angle_tables()
        recursion_N = None if self.stride is None else rows.segment_N * self.stride.recursions
        return x_NM, recursion_N, cos_PD[rows.positions_N], sin_PD[rows.positions_N]

    def _pass_by(self, kind: int, rows: Rows, x_NM: Tensor, seen: AttentionMetadata, output: StepOutput) -> None:
        """Nobody asks the exit behind a segment. Its own layer stores its entries, lest they be missing when it is asked
        again; it does not run, nor does its head."""
        s = self.parts.state
        if self.own[kind]:
            self.parts.layers.keep(x_NM, self.own[kind], seen, rows.positions_N)
        output.blank(s.spare)
        output.ints_NC[:, SLOT].copy_(rows.slots_N)  # it tells nothing, but who ran
        nothing_N = torch.zeros_like(rows.slots_N)
        self._end(rows, torch.zeros_like(rows.valid_N), x_NM, nothing_N, nothing_N.to(self.confidence_SK.dtype))

    def _settle(
        self, kind: int, rows: Rows, x_NM: Tensor, sure_N: Tensor | None, scores_NV: Tensor, variant: SamplingVariant,
        output: StepOutput,
    ) -> None:  # fmt: skip
        """Who exits, who is chosen, and what waits from here on."""
        exits_N, chosen_N, choice_N, confidence_N, depth_N, flags_N = self._decisions.find_exits(scores_NV, sure_N, rows)
        if self.copies == "entries" and kind != self.last:
            self._repeat(*self._left(exits_N, rows.segment_N, rows.slot_mapping_N))
        elif self.copies == "state" and kind != self.last:
            segments = range(self.last) if kind == ALL else [kind]
            self._copy_states(x_NM, exits_N, rows.segment_N, rows.slots_N, rows.positions_N, segments)
        self._choose(scores_NV, rows.slots_N, chosen_N, depth_N, confidence_N, variant, output, flags_N)
        self._end(rows, chosen_N, x_NM, choice_N, confidence_N)

    def _scores(self, read_NM: Tensor, segment_N: Tensor, kind: int) -> Tensor:
        """At a row's exit, or after the last layer."""
        layers = self.parts.layers
        if kind == self.last:
            return layers.scores(read_NM)
        if kind != ALL:
            index = self.exits[kind]
            return layers.scores(read_NM, index if index in self._own_heads else None)
        scores_NV = layers.scores(read_NM)
        for k, index in enumerate(self.exits):
            if index in self._own_heads:
                scores_NV = torch.where((segment_N == k)[:, None], layers.scores(read_NM, index), scores_NV)
        return scores_NV

    def _tell_plain(self, ints_NC: Tensor) -> None:
        """What each row's slot runs next, beside its flags."""
        _, segment_S, sizes_S, _ = self._waiting()
        slots_N = ints_NC[:, SLOT]
        ints_NC[:, FLAGS] += (segment_S[slots_N] << NEXT) + (sizes_S[slots_N] << WAITING)

    def _begin_plain(self, kind: int, many: int) -> tuple[Tensor, ...]:
        parts, s = self.parts, self.parts.state
        waits_S, segment_S, sizes_S, first_S = self._waiting()
        waits_S = waits_S if kind == ALL else waits_S & (segment_S == kind)
        if self.deepest:
            slots_N, number_N, valid_N = pick_groups(waits_S, s.since_S, sizes_S, many)
        else:  # nobody waits beside a current token
            slots_N = pick(waits_S, s.since_S, many)
            number_N, valid_N = torch.zeros_like(slots_N), slots_N != s.spare
        segment_N = torch.where(valid_N, segment_S[slots_N], max(kind, 0))
        last_N = valid_N & (number_N == sizes_S[slots_N] - 1)
        positions_N = torch.where(valid_N, first_S[slots_N] + number_N, 0)
        current_N = valid_N & (positions_N == s.position_S[slots_N])
        state_NM = self.ring_BSKM[(segment_N - 1).clamp_min(0), slots_N, positions_N % self.stack]
        writes_N, offset_N = None, None
        if self.stride is not None:
            offset_N = segment_N * self.stride.planes * parts.layers.pages.stride(0)
            writes_N = None if self.stride.planes else segment_N == 0
        none_N = torch.zeros_like(slots_N)
        seen = attention_for(s.tables_STP, slots_N, none_N, positions_N, valid_N, parts.page_size, writes_N, offset_N)
        rows = (slots_N, segment_N, last_N, valid_N, current_N, positions_N, state_NM)
        return *rows, seen.slot_mapping_N, seen.table_NP, seen.lengths_N

    def _waiting(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By slot: whether it runs, which segment, how many rows of it, and the position of the first."""
        s, one_S = self.parts.state, torch.ones_like(self.level_S)
        segment_S, sizes, firsts = self.level_S, [one_S], [s.position_S]
        before_S = s.position_S + (self.level_S > 0)
        for k in range(1, self.last + 1):
            if k <= self.deepest:
                filled_S = self.filled_BS[k - 1]
                pending_S = before_S - filled_S
                # Where too many would wait behind a segment, those that wait there already go first.
                first_S = (segment_S == k - 1) & self._overflows(segment_S, pending_S, sizes[-1])
                segment_S = torch.where(first_S, k, segment_S)
                before_S = filled_S
                sizes, firsts = [*sizes, pending_S], [*firsts, filled_S]
            else:
                sizes, firsts = [*sizes, one_S], [*firsts, s.position_S]
        waits_S = (s.stage_S == ENTER) & ((segment_S > 0) | (s.position_S < s.capacity_ST[:, 0]))
        at_1S = segment_S[None]
        return waits_S, segment_S, torch.stack(sizes).gather(0, at_1S)[0], torch.stack(firsts).gather(0, at_1S)[0]

    def _overflows(self, segment_S: Tensor, pending_S: Tensor, size_S: Tensor) -> Tensor:
        """Whether `size_S` tokens more cannot wait behind a segment."""
        return pending_S + size_S > self.stack

    def _left_plain(self, exits_N: Tensor, segment_N: Tensor, slot_mapping_N: Tensor) -> tuple[Tensor, Tensor]:
        """Where what exits has its entries, in whatever plane (-1: it does not), and the last recursion that it ran."""
        slots = self.parts.layers.pages.stride(0) * self.parts.page_size
        places_N = torch.where(exits_N & (slot_mapping_N >= 0), slot_mapping_N % slots, -1)
        return places_N, self._recursion_B[segment_N]

    def _copy_states(
        self, x_NM: Tensor, exits_N: Tensor, segment_N: Tensor, slots_N: Tensor, positions_N: Tensor, segments: Sequence[int]
    ) -> None:
        """What exits behind one of these segments leaves the entries that deeper steps, and the own layers of deeper exits,
        make of its state."""
        parts = self.parts
        for k in segments:
            here_N, none_N = exits_N & (segment_N == k), torch.zeros_like(slots_N)
            seen = attention_for(parts.state.tables_STP, slots_N, none_N, positions_N, here_N, parts.page_size)
            deeper = [step for steps in self.segments[k + 1 :] for step in steps]
            later = [step for own in self.own[k + 1 :] for step in own]
            parts.layers.keep(x_NM, (*deeper, *later), seen, positions_N)

    def _end_plain(self, rows: Rows, chosen_N: Tensor, x_NM: Tensor, choice_N: Tensor, confidence_N: Tensor) -> None:
        """States wait at the next segment; the last row of a slot says how far it is."""
        s, segment_N, positions_N = self.parts.state, rows.segment_N, rows.positions_N
        goes_on_N = rows.valid_N & (segment_N < self.last)
        at = (segment_N.clamp_max(self.last - 1), torch.where(goes_on_N, rows.slots_N, s.spare), positions_N % self.stack)
        self.ring_BSKM.index_put_(at, x_NM)
        slots_N = torch.where(rows.valid_N, rows.slots_N, s.spare)
        if self._judges:
            self.choice_SK.index_put_((slots_N, positions_N % self.places), choice_N)
        self.confidence_SK.index_put_((slots_N, positions_N % self.places), confidence_N)
        speaks_N = torch.where(rows.last_N, rows.slots_N, s.spare)
        if self.deepest:
            fills_N = rows.last_N & (segment_N >= 1) & (segment_N <= self.deepest)
            filled = ((segment_N - 1).clamp_min(0), torch.where(fills_N, rows.slots_N, s.spare))
            self.filled_BS.index_put_(filled, positions_N + 1)
        level_N = torch.where(rows.current_N & ~chosen_N, segment_N + 1, 0)
        self.level_S.index_put_((torch.where(rows.current_N, rows.slots_N, s.spare),), level_N)
        s.since_S.index_copy_(0, speaks_N, s.clock.expand_as(speaks_N))
        s.clock.add_(1)
