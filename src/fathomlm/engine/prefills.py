"""Prefill passes: started, and confirmed when the device has told how many entries they left.

How many entries the tokens of a mixture of recursions leave is known when the device has run them. To wait for that before
the next pass is scheduled would leave a GPU without work for as long as scheduling takes. So while there is more to prefill
and pages are plenty, a pass is confirmed behind the start of the next one, if the device may be ahead (`lag`): what is
collected before the next one confirms it. Until then its tokens count as entries of every table (`Sequence`), which is why
that is not done where pages are scarce.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from fathomlm.engine.runner import PrefilledEntries, Runner
from fathomlm.engine.schedule import PrefillChunk
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence
from fathomlm.engine.slot_records import SlotRecords, Totals


@dataclass(frozen=True, slots=True)
class _PrefillPass:
    sequences: list[Sequence]
    """Of each chunk. It may leave its slot before the pass is confirmed."""
    chunks: abc.Sequence[PrefillChunk]
    entries: PrefilledEntries
    number: int
    """Of the first decode step behind it: with that one tokens may come of sequences that it has prefilled."""


class Prefills:
    def __init__(
        self, runner: Runner, scheduler: Scheduler, records: SlotRecords, totals: abc.Callable[[], Totals], full: int | None
    ) -> None:
        """`totals` are the engine's. `full` is how many layers a token runs that does not exit early, where generated tokens
        leave again where they left before (`Sequence.replays`); else None."""
        self._runner, self._scheduler, self._records, self._totals = runner, scheduler, records, totals
        self._full = full
        self._unconfirmed: _PrefillPass | None = None

    def begin(self, chunks: abc.Sequence[PrefillChunk], sequences: list[Sequence]) -> None:
        """Start a pass over these chunks of these sequences, in front of the next decode steps."""
        begun = self._begin(chunks, sequences) if chunks else None
        self.confirm()  # the one before, while the device has this one to work on
        self._unconfirmed = begun
        if begun is not None and not (begun.entries.later and self._scheduler.running):
            self.confirm()  # at no cost, or nobody would run

    def look(self) -> None:
        """Before `schedule`. A pass stays unconfirmed until the next one has begun where nobody waits for what it tells.
        The device has decode steps to run meanwhile."""
        if self._unconfirmed is not None and not self._may_wait(self._unconfirmed):
            self.confirm()

    def confirm(self, number: int | None = None) -> None:
        """Tell the scheduler what the last pass left, unless it knows. With a number only where the pass was started before
        the decode step of that number."""
        done = self._unconfirmed
        if done is None or (number is not None and number < done.number):
            return
        left = done.entries.get()
        self._unconfirmed = None
        for sequence, chunk, entries in zip(done.sequences, done.chunks, left, strict=True):
            self._totals().prefill_tokens += chunk.count
            if self._scheduler.confirm_prefill(sequence.id, chunk.epoch, chunk.first + chunk.count, entries):
                self._records.entries_TS[:, chunk.slot] = entries

    def _may_wait(self, done: _PrefillPass) -> bool:
        """Whether this pass may stay unconfirmed until the next one has begun. Whoever begins like one of its sequences
        would not find in the prefix cache what it leaves there."""
        scheduler = self._scheduler
        return (
            scheduler.roomy_to_prefill and scheduler.more_to_prefill and not scheduler.repeats(done.sequences, done.chunks)
        )

    def _begin(self, chunks: abc.Sequence[PrefillChunk], sequences: list[Sequence]) -> _PrefillPass:
        tokens = [
            sequence.known[chunk.first : chunk.first + chunk.count]
            for sequence, chunk in zip(sequences, chunks, strict=True)
        ]
        depths = None
        if self._full is not None and any(sequence.tokens for sequence in sequences):
            depths = [
                sequence.depths_from(chunk.first, chunk.count, self._full)
                for sequence, chunk in zip(sequences, chunks, strict=True)
            ]
        entries = self._runner.prefill(chunks, tokens, depths)
        return _PrefillPass(sequences, chunks, entries, self._runner.launched)
