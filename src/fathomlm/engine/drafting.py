"""Whether drafting pays, decided by measurement for the number of sequences that run.

Drafts cost passes; what they save depends on how often they are right and on whether the device would have been idle
otherwise. With few sequences a forward pass mostly reads weights, and verifying several tokens costs hardly more than one;
with many it is bound by arithmetic, and wrong drafts are work for nothing. Both ways choose the same tokens
(`programs.drafts`), so they can be tried: each for a few bursts, then the faster one for many, then the other once more.
What counts is the device's time between the start of a burst and its end: the host runs ahead of it, and prompts come in
between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

TRIAL, LEAST = 6, 2
"""Bursts that are measured at a time, and those after which a trial of what is clearly slower ends."""
CLEARLY = 0.8
"""Of the other way's speed."""
REPEATS = (8, 16, 32)
"""Trials of the faster way in front of each of the slower: the first may have been misled, and later ones cost at most a
33rd of the difference."""
SMOOTHING = 0.7
"""The weight of the last trial in what is known of a way."""


@dataclass(slots=True)
class _Known:
    """What is known for about as many sequences, and the trial under way. A trial may be interrupted by other numbers of
    sequences, and goes on when these come again: short requests would otherwise never end one."""

    drafts: bool = False
    bursts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rates: dict[bool, float] = field(default_factory=dict)
    """Tokens per second, with drafts and without."""
    trials: int = 0
    """Of the faster way, since the other was tried."""
    tried: int = 0
    """How often the slower way was tried again."""

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def is_over(self) -> bool:
        other = self.rates.get(not self.drafts)
        slower = other is not None and self.bursts >= LEAST and self.rate < CLEARLY * other
        return slower or self.bursts >= TRIAL

    def learn(self) -> None:
        """End the trial, and choose for the next."""
        rate, before = self.rate, self.rates.get(self.drafts)
        self.rates[self.drafts] = rate if before is None else before + SMOOTHING * (rate - before)
        self.bursts, self.tokens, self.seconds = 0, 0, 0.0
        self.trials += 1
        faster = self.drafts if len(self.rates) < 2 else self.rates[True] >= self.rates[False]
        if faster != self.drafts:  # a trial of the slower way
            self.trials = 0
        again = self.trials >= self._due
        self.drafts = not faster if again else faster
        if again:
            self.trials, self.tried = 0, self.tried + 1

    @property
    def _due(self) -> int:
        """Trials of this way in front of one of the other."""
        if len(self.rates) < 2:
            return REPEATS[0] if self.tried else 1
        return REPEATS[min(self.tried, len(REPEATS)) - 1]


class DraftControl:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._drafts = False
        self.changed = False
        """Whether the burst that was chosen for last is the first of its way: it also ends what the other has begun, and
        says nothing of either."""

    def choose(self, running: int) -> bool:
        """Whether the next burst drafts. Without drafts first, what they are compared with, unless other numbers of
        sequences tell what is faster."""
        bucket = running.bit_length()
        if bucket not in self._known:
            self._known[bucket] = self._like(bucket)
        known = self._known[bucket]
        if known.is_over:
            known.learn()
        self.changed, self._drafts = known.drafts != self._drafts, known.drafts
        return known.drafts

    def _like(self, bucket: int) -> _Known:
        """What does not pay for fewer sequences does not pay for more, and what pays for more pays for fewer."""
        for other, known in self._known.items():
            if len(known.rates) == 2:
                pays = known.rates[True] >= known.rates[False]
                if (other >= bucket) if pays else (other <= bucket):
                    return _Known(drafts=pays, tried=1)
        return _Known()

    def note(self, drafts: bool, running: int, tokens: int, seconds: float) -> None:
        """What a burst of so many sequences gave, and how long the device took for it, prompts and captures aside."""
        known = self._known[running.bit_length()]
        if known.drafts == drafts:
            known.bursts += 1
            known.tokens += tokens
            known.seconds += seconds


class Moment(Protocol):
    """A point in the device's work, which may lie ahead."""

    def until(self, later: Self) -> float:
        """Seconds; waits for the later one."""
        ...


class TimedBurst(NamedTuple):
    """A burst on its way, and between which moments of the device it runs."""

    first: int
    last: int
    """The numbers of its decode steps."""
    drafts: bool
    running: int
    start: Moment
    end: Moment
