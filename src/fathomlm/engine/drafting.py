"""Whether drafting pays, decided by measurement for the number of sequences that run.

Drafts cost passes; what they save depends on how often they are right and on whether the device would have been idle
otherwise. With few sequences a forward pass mostly reads weights, and verifying several tokens costs hardly more than one;
with many it is bound by arithmetic, and wrong drafts are work for nothing. Both ways choose the same tokens
(`programs.drafts`), so they can be tried: each for a few bursts, then the faster one for many, then the other once more, as
far as what that costs stays a small part of the whole.

What counts is the device's time between the start of a burst and its end: the host runs ahead of it, and prompts come in
between. Drafts have to be faster by a margin, because they cost something outside of bursts too: sequences that began
together end one by one, and the prompts that follow are read one by one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

TRIAL, LEAST = 6, 2
"""Bursts that are measured at a time, and those after which a trial of what is clearly slower ends."""
CLEARLY = 0.8
"""Of the other way's speed."""
MARGIN = 1.1
"""How much faster drafts must be."""
REPEATS = 8
"""Trials of the faster way, at least, in front of one of the slower."""
SHARE = 0.005
"""Of the device's time: what trials of the slower way may cost, counted over all numbers of sequences. Requests whose number
changes all the time would otherwise pay for a trial of each."""
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

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def faster(self) -> bool:
        """As far as is known; where one way was never measured, the other."""
        if len(self.rates) < 2:
            return next(iter(self.rates), self.drafts)
        return self.rates[True] >= MARGIN * self.rates[False]

    @property
    def is_over(self) -> bool:
        other = self.rates.get(not self.drafts)
        slower = other is not None and self.bursts >= LEAST and self.rate < CLEARLY * other
        return slower or self.bursts >= TRIAL

    def learn(self, may_try: bool) -> None:
        """End the trial, and choose for the next: the faster way, or the other, where it `may` be tried."""
        rate, before = self.rate, self.rates.get(self.drafts)
        self.rates[self.drafts] = rate if before is None else before + SMOOTHING * (rate - before)
        self.bursts, self.tokens, self.seconds = 0, 0, 0.0
        self.trials = self.trials + 1 if self.drafts == self.faster else 0
        due = self.trials >= (REPEATS if len(self.rates) == 2 else 1)
        self.drafts = self.faster != (may_try and due)
        if self.drafts != self.faster:
            self.trials = 0

    def lost(self, tokens: int, seconds: float) -> float:
        """What a burst of the way under trial took more than the faster one would have."""
        if self.drafts == self.faster:
            return 0.0
        return max(0.0, seconds - tokens / max(self.rates[self.faster], 1e-9))


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
    changed: bool
    running: int
    start: Moment
    end: Moment


class DraftControl:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._drafts = False
        self._seconds = self._lost = 0.0
        self._under_way: deque[TimedBurst] = deque()
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
            known.learn(may_try=self._lost <= SHARE * self._seconds)
        self.changed, self._drafts = known.drafts != self._drafts, known.drafts
        return known.drafts

    def _like(self, bucket: int) -> _Known:
        """What does not pay for fewer sequences does not pay for more, and what pays for more pays for fewer."""
        for other, known in self._known.items():
            if len(known.rates) == 2:
                pays = known.faster
                if (other >= bucket) if pays else (other <= bucket):
                    return _Known(drafts=pays, trials=1 - REPEATS)
        return _Known()

    def note(self, drafts: bool, running: int, tokens: int, seconds: float, *, changed: bool = False) -> None:
        """What a burst of so many sequences gave, and how long the device took for it, prompts and captures aside."""
        known = self._known[running.bit_length()]
        self._seconds += seconds
        if known.drafts == drafts:
            self._lost += known.lost(tokens, seconds)
            if not changed:
                known.bursts += 1
                known.tokens += tokens
                known.seconds += seconds

    def begin(self, burst: TimedBurst) -> None:
        """A burst was started, whose time is to be noted."""
        self._under_way.append(burst)

    def end(self, first: int, last: int, tokens: int) -> None:
        """Decode steps of these numbers gave so many tokens: that is noted where they are one burst."""
        while self._under_way and self._under_way[0].last <= last:
            burst = self._under_way.popleft()
            if (burst.first, burst.last) == (first, last):
                seconds = burst.start.until(burst.end)
                self.note(burst.drafts, burst.running, tokens, seconds, changed=burst.changed)
