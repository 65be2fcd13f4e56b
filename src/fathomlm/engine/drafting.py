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
REPEATS = (8, 16, 32)
"""Trials of the faster way in front of each of the slower: the first may have been misled, and later ones cost at most a
33rd of the difference."""
SMOOTHING = 0.5
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

    def learn(self) -> None:
        """End the trial, and choose for the next."""
        rate, before = self.tokens / max(self.seconds, 1e-9), self.rates.get(self.drafts)
        self.rates[self.drafts] = rate if before is None else before + SMOOTHING * (rate - before)
        self.bursts, self.tokens, self.seconds = 0, 0, 0.0
        if len(self.rates) < 2:
            self.drafts = not self.drafts
            return
        faster = self.rates[True] >= self.rates[False]
        self.trials += faster == self.drafts
        again = self.trials >= REPEATS[min(self.tried, len(REPEATS) - 1)]
        self.drafts = not faster if again else faster
        if again:
            self.trials, self.tried = 0, self.tried + 1


class DraftControl:
    def __init__(self, skip: int = 0) -> None:
        """`skip` is how many bursts after a change still show what was before: the device runs ahead of the host."""
        self._known: dict[int, _Known] = {}
        self._now = _Known()
        self._skip, self._unsure = skip, 0

    def choose(self, running: int) -> bool:
        """Whether the next burst drafts. Without drafts first: what they are compared with."""
        before, self._now = self._now.drafts, self._known.setdefault(running.bit_length(), _Known())
        if self._now.bursts >= TRIAL:
            self._now.learn()
        if self._now.drafts != before:
            self._unsure = self._skip
        return self._now.drafts

    def note(self, tokens: int, seconds: float) -> None:
        """What came between two bursts; not where prompts were read or steps were captured in between."""
        if self._unsure:
            self._unsure -= 1
            return
        self._now.bursts += 1
        self._now.tokens += tokens
        self._now.seconds += seconds
