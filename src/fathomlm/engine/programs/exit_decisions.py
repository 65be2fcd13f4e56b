"""How sure the exits are of the rows of a pass, and who exits (thesis 2.5; `decode.confidence`).

Shapes: N rows, S slots, B segments but the first, K tokens of a slot on their way, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.decode.confidence import MEASURES, AtExit, find_classifiers, find_gate
from fathomlm.engine.programs.base import AGREED, JUDGED, ProgramContext
from fathomlm.engine.programs.lone_rows import SlotExits
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.model.route import draw

ALL = -1
"""The pass that rows of every segment share."""


class Rows(NamedTuple):
    """The rows of one pass."""

    slots_N: Tensor
    segment_N: Tensor
    last_N: Tensor
    """The last row of its slot."""
    valid_N: Tensor
    current_N: Tensor
    """The row is its slot's current token; the others have exited and wait."""
    positions_N: Tensor
    state_NM: Tensor
    """What a row enters its segment with; nothing in segment 0."""
    slot_mapping_N: Tensor


class ExitDecisions:
    def __init__(
        self, parts: ProgramContext, exits: Sequence[int], kept: SlotExits, scores_SV: Tensor, *, confidence: str,
        judges: bool, decay: float | None, forced: float | None,
    ) -> None:  # fmt: skip
        """`scores_SV` is what the last exit that a slot's token met made of it, where that is compared; what `confidence`
        changes is the program's own. `judges`: every token runs the last segment. The rest is as in `ExitProgram`."""
        self._state, self._exits, self._last, self.measure = parts.state, tuple(exits), len(exits), confidence
        self._choice_SK, self._confidence_SK, self._threshold_SB = kept.choice_SK, kept.confidence_SK, kept.threshold_SB
        self._scores_SV, self._places = scores_SV, kept.choice_SK.shape[1]
        self._judges, self._decay, self._forced = judges, decay, forced
        self.ends_B = torch.tensor(kept.cuts, device=parts.state.device)
        decoder = parts.layers.decoder
        self._own_heads = any(decoder.has_exit_head(index) for index in exits)
        find = {"classifier": find_classifiers, "gate": find_gate}.get(confidence)
        self._classifiers = {} if find is None else find(decoder, self._exits)
        self._classified = parts.small(self._classified_plain)
        self.find_exits = parts.small(self._find_exits_plain)

    def confidence(self, exit: AtExit, rows: Rows, kind: int) -> Tensor | None:
        """How sure the exits are; None where it follows from the scores' best two, which are looked for anyway."""
        if self.measure == "gap":
            return None
        if self.measure == "kl":
            slots_N = torch.where(rows.valid_N, rows.slots_N, self._state.spare)
            known_NV = torch.where((rows.segment_N == 0)[:, None], 0.0, self._scores_SV[slots_N])
            self._scores_SV.index_put_((slots_N,), exit.logits_RV)
            return MEASURES["kl"](replace(exit, logits_before_RV=known_NV))
        if not self._classifiers:
            return MEASURES[self.measure](exit)
        exits = range(self._last) if kind == ALL else [min(kind, self._last - 1)]
        if self.measure == "gate" and not self._own_heads:  # one gate, which reads the same at every exit
            exits = exits[:1]
        assert exit.read_RM is not None
        return self._classified(exit.read_RM, rows, exits)

    def _classified_plain(self, read_NM: Tensor, rows: Rows, exits: Sequence[int]) -> Tensor:
        before_N = self._confidence_SK[rows.slots_N, rows.positions_N % self._places]
        before_N = torch.where(rows.segment_N == 0, 0.0, before_N)
        found_N = torch.zeros_like(before_N)
        for number, k in enumerate(exits):
            at = AtExit(read_NM, read_NM, read_NM, self._classifiers[self._exits[k]], before=before_N)
            sure_N = MEASURES[self.measure](at)
            found_N = torch.where(rows.segment_N == k, sure_N, found_N) if number else sure_N
        return found_N

    def _find_exits_plain(self, scores_NV: Tensor, sure_N: Tensor | None, rows: Rows) -> tuple[Tensor, ...]:
        """Who exits, who is chosen, what the exit chose and how sure it was, after how many layers, and whether the last
        layer would have chosen the same."""
        s, slots_N = self._state, rows.slots_N
        at = (slots_N, rows.positions_N % self._places)
        ends_N = rows.valid_N & (rows.segment_N == self._last)
        meets_N = rows.current_N & ~ends_N
        # Where nothing waits a token that exited is never judged, and those that did not say nothing of it: no flags, and
        # nobody asks what an exit would have chosen.
        choice_N = flags_N = torch.zeros_like(slots_N)
        if sure_N is None or self._judges:
            choice_N, gap_N = best_and_gap(scores_NV)
            sure_N = gap_N if sure_N is None else sure_N
        if self._judges:
            judged_N = ends_N & (choice_N == self._choice_SK[at])
            flags_N = ends_N.long() * JUDGED + judged_N.long() * AGREED
            choice_N = torch.where(meets_N, choice_N, self._choice_SK[at])
        sure_N = sure_N.clamp(0, 1)
        confidence_N = torch.where(meets_N, sure_N, self._confidence_SK[at])
        threshold_N = self._threshold_SB[slots_N, rows.segment_N.clamp_max(self._last - 1)]
        if self._decay is not None:
            written_N = s.generated_S[slots_N] / s.limit_S[slots_N].clamp_min(1)
            threshold_N = (0.9 * threshold_N + 0.1 * torch.exp(-self._decay * written_N)).clamp_max(1.0)
        above_N = (threshold_N == 0) | (confidence_N > threshold_N)
        if self._forced is not None:
            keys_N = s.position_S[slots_N] + 7919 * s.epoch_S[slots_N]
            drawn_NK = torch.stack([draw(keys_N, k) for k in range(self._last)], 1)
            above_N = drawn_NK.gather(1, rows.segment_N.clamp_max(self._last - 1)[:, None])[:, 0] < self._forced
        exits_N = meets_N & above_N
        chosen_N = exits_N | (rows.current_N & ends_N)
        return exits_N, chosen_N, choice_N, confidence_N, self.ends_B[rows.segment_N], flags_N
