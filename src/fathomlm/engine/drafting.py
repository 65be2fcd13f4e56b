"""Whether drafting pays, decided by measurement for the number of sequences that run.

Drafts cost passes; what they save depends on how often they are right and on whether the device would have been idle
otherwise. With few sequences a forward pass mostly reads weights, and verifying several tokens costs hardly more than one;
with many it is bound by arithmetic, and wrong drafts are work for nothing. Both ways choose the same tokens
(`programs.drafts`), so they can be tried: each for a few bursts, then the faster one for many, then the other once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 8
"""Bursts that are measured at a time."""
REPEAT = 32
"""Trials of the faster way for each of the slower: trying costs at most a 33rd of the difference."""
SMOOTHING = 0.5
"""The weight of the last trial in what is known of a way."""


@dataclass(slots=True)
class _Known:
    """What is known for about as many sequences."""

    rates: dict[bool, float] = field(default_factory=dict)
    """Tokens per second, with drafts and without."""
    trials: int = 0
    """Of the faster way, since the other was tried."""


class DraftControl:
    def __init__(self, skip: int = 0) -> None:
        """`skip` is how many bursts after a change still show what was before: the device runs ahead of the host."""
        self._known: dict[int, _Known] = {}
        self._skip = skip
        self._drafts = False
        self._bucket = -1
        self._bursts = self._tokens = 0
        self._seconds = 0.0

    def choose(self, running: int) -> bool:
        """Whether the next burst drafts."""
        bucket = running.bit_length()
        if bucket != self._bucket:
            self._bucket = bucket
            self._begin()
        elif self._bursts - self._skip >= TRIAL:
            self._learn()
            self._begin()
        return self._drafts

    def note(self, tokens: int, seconds: float) -> None:
        """What came between two bursts; not where prompts were read in between."""
        self._bursts += 1
        if self._bursts > self._skip:
            self._tokens += tokens
            self._seconds += seconds

    def _learn(self) -> None:
        known = self._known.setdefault(self._bucket, _Known())
        rate, before = self._tokens / max(self._seconds, 1e-9), known.rates.get(self._drafts)
        known.rates[self._drafts] = rate if before is None else before + SMOOTHING * (rate - before)
        known.trials += 1

    def _begin(self) -> None:
        """Choose for the next trial."""
        known = self._known.setdefault(self._bucket, _Known())
        before, rates = self._drafts, known.rates
        if len(rates) < 2:
            self._drafts = False in rates  # without drafts first: what they are compared with
        else:
            faster = rates[True] >= rates[False]
            again = known.trials >= REPEAT
            self._drafts = not faster if again else faster
            known.trials = 0 if again else known.trials
        self._tokens, self._seconds = 0, 0.0
        self._bursts = 0 if self._drafts != before else self._skip
