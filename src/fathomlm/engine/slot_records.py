"""What the host has received of the sequence in each slot, as arrays. A burst is taken in at once, and a sequence is visited
only when something happened to it: it has ended, it runs out of pages, or somebody waits for its tokens. Then it is handed
what has arrived.

Shapes: R rows of a burst and K of them that count, S slots and one more for rows that stand for nothing, T tables, L tokens
of a sequence, D depths.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fathomlm.decode.text import Tokens
from fathomlm.engine.layout import Layout
from fathomlm.engine.programs.base import (
    BAD,
    CONFIDENCE,
    DEPTH,
    DRAFTED,
    ENDED,
    EPOCH,
    FLAGS,
    INDEX,
    SLOT,
    TOKEN,
    VALID,
)
from fathomlm.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
NOBODY = -1
"""The epoch of a slot without a sequence."""
NEVER = 2**62
FEW = 16
"""Rows up to which Python is faster than numpy."""
MANY = 32
"""Tokens of a sequence from which on it is quicker to look their numbers up than to make them."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a burst has brought."""

    tokens: int
    depths: int
    """The sum of the tokens' depths."""
    exited: int
    """Tokens that exited early."""
    drafted: int
    """Tokens that an exit had drafted a token for, and of those whose draft was kept."""
    accepted: int
    visits: list[int]
    """Slots to which something happened, in order."""
    flags: list[int]
    """Of the token that ended their sequence; 0 while it goes on."""
    short: list[bool]
    """Whether their pages are running out."""


@dataclass(slots=True)
class Totals:
    """What an engine has done so far."""

    decode_steps: int = 0
    tokens: int = 0
    depths: int = 0
    """The sum of the tokens' depths."""
    exited: int = 0
    """Tokens that exited early."""
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    finished: int = 0
    prefill_tokens: int = 0

    def add(self, taken: Taken, times: int = 1) -> None:
        """`times` is -1 where tokens are taken back."""
        self.tokens += times * taken.tokens
        self.depths += times * taken.depths
        self.exited += times * taken.exited
        self.drafted += times * taken.drafted
        self.accepted += times * taken.accepted


class SlotRecords:
    def __init__(self, layout: Layout, slots: int, max_length: int, recursions: int, full_depth: int, vocab: int) -> None:
        """`full_depth` is the depth below which a token exited early, 0 where none can."""
        many, tables = slots + 1, len(layout.tables)
        self.epoch_S = np.full(many, NOBODY, np.int64)
        self.known_S = np.zeros(many, np.int64)
        """Tokens of the completion that have arrived."""
        self.most_S = np.zeros(many, np.int64)
        """The most tokens that the completion will have."""
        self.flags_S = np.zeros(many, np.int64)
        """Of the token that ended the sequence; 0 while it goes on."""
        self.first_S = np.full(many, np.nan)
        """When the first token of this placement arrived, and the last."""
        self.last_S = np.full(many, np.nan)
        self.entries_TS = np.zeros((tables, many), np.int64)
        """Confirmed by the tokens that have arrived."""
        self.alarm_TS = np.full((tables, many), NEVER, np.int64)
        """With more entries than these the scheduler has to hear of it: the pages are running out."""
        self.due_S = np.full(many, NEVER, np.int64)
        """With so many tokens of its completion a sequence is visited, because somebody waits for them."""
        self.tokens_SL = np.zeros((many, max_length), np.int32)  # memory is taken as it is written
        self.depths_SL = np.zeros((many, max_length), np.int16)
        self._tokens, self._depths = self.tokens_SL.reshape(-1).data, self.depths_SL.reshape(-1).data
        """The same as memory views, of which Python takes some numbers in two thirds of the time."""
        self.confidences_SL = np.zeros((many, max_length if layout.kind == "exits" else 0), np.float32)
        self.drafted_SL = np.zeros(self.confidences_SL.shape, np.bool_)
        """Tokens that an exit had drafted a token for."""
        self._numbers_V = np.arange(vocab).astype(object)
        """Python's own numbers, so that they are not made, and thrown away, for each token."""
        self._full_depth = full_depth
        deeper = layout.kind == "routed" and tables > 1
        self._added_TD = np.array([layout.added(depth) for depth in range(recursions + 1)]).T if deeper else None

    def place(
        self, slot: int, epoch: int, known: int, entries: abc.Sequence[int], due: int = NEVER, most: int = NEVER
    ) -> None:  # fmt: skip
        """A sequence comes into a slot with so many tokens of its completion, which will have `most`, and to which somebody
        waits for as many as are `due`."""
        self.epoch_S[slot], self.known_S[slot], self.flags_S[slot], self.most_S[slot] = epoch, known, 0, most
        self.first_S[slot] = self.last_S[slot] = np.nan
        self.entries_TS[:, slot], self.alarm_TS[:, slot], self.due_S[slot] = entries, NEVER, due

    def clear(self, slot: int) -> None:
        """What still arrives of a slot's sequence is not wanted."""
        self.epoch_S[slot], self.due_S[slot] = NOBODY, NEVER

    def most_left(self, rows: int = 1) -> int:
        """The most tokens that any sequence still lacks, as far as they have arrived, or that each of so many rows must add
        where there are more sequences than rows."""
        left_S = np.where(self.epoch_S == NOBODY, 0, self.most_S - self.known_S)
        here = np.count_nonzero(left_S) > rows
        return max(int(left_S.max()), -(-int(left_S.sum()) // rows) if here else 0)

    def grant(self, rooms: abc.Mapping[tuple[int, int], int], most: abc.Iterable[int], lookahead: int) -> None:
        """By slot and table, how many entries there are pages for, and for each of them the most that there will ever be."""
        slots, tables = zip(*rooms, strict=True)
        room_G = np.fromiter(rooms.values(), np.int64, len(rooms))
        most_G = np.fromiter(most, np.int64, len(rooms))
        self.alarm_TS[tables, slots] = np.where(room_G < most_G, room_G - lookahead, NEVER)

    def look_further(self, tokens: int) -> None:
        """Alarms come so many tokens earlier, or later where that is negative."""
        self.alarm_TS[self.alarm_TS != NEVER] -= tokens

    def current(self, ints_RC: Ints) -> npt.NDArray[np.bool_]:
        """Rows of sequences that are still there: others were stopped, or preempted, after their decode step was started."""
        found: npt.NDArray[np.bool_] = self.epoch_S[ints_RC[:, SLOT]] == ints_RC[:, EPOCH]
        return found

    def take(self, ints_RC: Ints, floats_RC: Floats, now: float) -> Taken:
        """Take in what the decode steps of a burst chose. `take_one_by_one` is the meaning: Python for every token would
        cost more than a GPU takes to choose it."""
        ints_CR = np.ascontiguousarray(ints_RC.T)
        here_R = (ints_CR[FLAGS] & VALID != 0) & (self.epoch_S[ints_CR[SLOT]] == ints_CR[EPOCH])
        if np.count_nonzero(here_R) <= FEW:
            return self.take_one_by_one(ints_RC[here_R], floats_RC[here_R], now)
        over_R = here_R & (ints_CR[FLAGS] & (ENDED | BAD) != 0)
        over = ints_CR[SLOT, over_R]
        self.flags_S[over] = ints_CR[FLAGS, over_R]
        at_K = np.flatnonzero(here_R & (ints_CR[FLAGS] & BAD == 0))
        slot_K, token_K, depth_K, index_K = (ints_CR[column].take(at_K) for column in (SLOT, TOKEN, DEPTH, INDEX))
        slots = len(self.known_S)
        counts_S = np.bincount(slot_K, minlength=slots)
        before_S = self.known_S.copy()
        self.known_S += counts_S
        known = (index_K >= before_S[slot_K]) & (index_K < self.known_S[slot_K])
        assert known.all(), "a token is missing, or came twice"
        self.tokens_SL[slot_K, index_K] = token_K
        self.depths_SL[slot_K, index_K] = depth_K
        drafted, accepted = 0, 0
        if self.confidences_SL.size:
            drafted_K = ints_CR[FLAGS].take(at_K) & DRAFTED != 0
            drafted, accepted = int(drafted_K.sum()), self.exited(depth_K[drafted_K])
            self.drafted_SL[slot_K, index_K] = drafted_K
            self.confidences_SL[slot_K, index_K] = floats_RC[at_K, CONFIDENCE]
        if self._added_TD is None:
            self.entries_TS[0] += counts_S
        else:
            depths = self._added_TD.shape[1]
            self.entries_TS += self._added_TD @ np.bincount(depth_K * slots + slot_K, minlength=depths * slots).reshape(
                depths, -1
            )
        fresh_S = counts_S > 0
        self.last_S[fresh_S] = now
        self.first_S[fresh_S & np.isnan(self.first_S)] = now
        short_S = fresh_S & (self.entries_TS > self.alarm_TS).any(0)
        visited_S = (fresh_S & (self.known_S >= self.due_S)) | short_S
        visited_S[over] = True
        visits = np.flatnonzero(visited_S)
        return Taken(
            len(at_K), int(depth_K.sum()), self.exited(depth_K), drafted, accepted,
            visits.tolist(), self.flags_S[visits].tolist(), short_S[visits].tolist(),
        )  # fmt: skip

    def take_one_by_one(self, ints_RC: Ints, floats_RC: Floats, now: float) -> Taken:
        tokens, depths, exited, drafted, accepted = 0, 0, 0, 0, 0
        visits: dict[int, bool] = {}
        for row, (slot, epoch, token, depth, flags, index) in enumerate(ints_RC.tolist()):
            if not flags & VALID or self.epoch_S[slot] != epoch:
                continue
            if flags & (ENDED | BAD):
                self.flags_S[slot] = flags
                visits.setdefault(slot, False)
            if flags & BAD:
                continue
            assert index == self.known_S[slot], f"slot {slot}: token {index}, {self.known_S[slot]} are known"
            self.tokens_SL[slot, index], self.depths_SL[slot, index] = token, depth
            if self.confidences_SL.size:
                self.confidences_SL[slot, index] = floats_RC[row, CONFIDENCE]
                self.drafted_SL[slot, index] = bool(flags & DRAFTED)
                drafted += bool(flags & DRAFTED)
                accepted += bool(flags & DRAFTED) and depth < self._full_depth
            self.known_S[slot] += 1
            self.entries_TS[:, slot] += 1 if self._added_TD is None else self._added_TD[:, depth]
            if np.isnan(self.first_S[slot]):
                self.first_S[slot] = now
            self.last_S[slot] = now
            short = bool((self.entries_TS[:, slot] > self.alarm_TS[:, slot]).any())
            if short or self.known_S[slot] >= self.due_S[slot]:
                visits[slot] = short
            tokens, depths, exited = tokens + 1, depths + depth, exited + (depth < self._full_depth)
        met = sorted(visits)
        flags = self.flags_S[met].tolist()
        return Taken(tokens, depths, exited, drafted, accepted, met, flags, [visits[slot] for slot in met])

    def hand_over(self, sequences: abc.Sequence[Sequence]) -> None:
        """Tokens that have arrived and that these sequences, each in its slot, have not got yet."""
        slots, long = [sequence.slot for sequence in sequences if sequence.slot is not None], self.tokens_SL.shape[1]
        arrived, times = self.known_S[slots].tolist(), self.last_S[slots].tolist()
        for sequence, slot, known, last in zip(sequences, slots, arrived, times, strict=True):
            told = len(sequence.tokens)
            if known == told:
                continue
            here = slice(slot * long + told, slot * long + known)
            if known - told < MANY:
                sequence.tokens += self._tokens[here].tolist()
            else:
                sequence.tokens += self._numbers_V.take(self.tokens_SL[slot, told:known]).tolist()
            if sequence.depths is not None:
                sequence.depths += self._depths[here].tolist()
            if sequence.confidences is not None:
                sequence.confidences += self.confidences_SL[slot, told:known].tolist()
                self._hand_over_exits(sequence, told, known)
            if sequence.first_token_time is None:
                sequence.first_token_time = float(self.first_S[slot])
            sequence.last_token_time = last

    def completion(self, sequence: Sequence) -> Tokens:
        """The tokens that a sequence has got, where possible as an array: unless it has been in another slot before, they
        stand here from the first on."""
        if sequence.slot is None or sequence.preemptions:
            return sequence.tokens
        return self.tokens_SL[sequence.slot, : len(sequence.tokens)]

    def _hand_over_exits(self, sequence: Sequence, first: int, end: int) -> None:
        """How many of these tokens were drafted, and the last one up to which every layer has its exact entries."""
        drafted_K = self.drafted_SL[sequence.slot, first:end]
        sequence.drafted += int(drafted_K.sum())
        if not sequence.replays:
            (exact_K,) = np.nonzero(drafted_K | (self.depths_SL[sequence.slot, first:end] >= self._full_depth))
            if len(exact_K):
                sequence.exact = len(sequence.prompt) + first + int(exact_K[-1])

    def drop(self, sequence: Sequence, kept: int) -> Taken:
        """Forget the tokens behind the first `kept`: they were chosen before the host knew that it was over."""
        assert sequence.slot is not None
        here, drafted, accepted = (sequence.slot, slice(kept, len(sequence.tokens))), 0, 0
        depths_K = self.depths_SL[here]
        if sequence.confidences is not None:
            drafted_K = self.drafted_SL[here]
            drafted, accepted = int(drafted_K.sum()), self.exited(depths_K[drafted_K])
            sequence.drafted -= drafted
        self.known_S[sequence.slot] = kept
        for column in (sequence.tokens, sequence.depths, sequence.confidences, sequence.logprobs):
            if column is not None:
                del column[kept:]
        return Taken(len(depths_K), int(depths_K.sum()), self.exited(depths_K), drafted, accepted, [], [], [])

    def exited(self, depths_K: npt.NDArray[np.integer[Any]]) -> int:
        """How many of some tokens exited early."""
        return int((depths_K < self._full_depth).sum()) if self._full_depth else 0
