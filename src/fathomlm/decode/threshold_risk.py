"""A threshold with a promise: the share of wrong tokens stays below a target, with a stated confidence.

A token is wrong if it exits, its confidence being above the threshold, and its choice is not the full model's; the share is
of all tokens, those that do not exit included. Learn-then-Test (Angelopoulos et al. 2021, as in CALM, Schuster et al. 2022)
finds the smallest threshold for which this is safe to say. The thresholds are tested from 1 downwards, each against the
hypothesis that its share is the target or more. At the first that cannot be rejected the search ends, and the last one that
could be is taken: since the order is fixed, testing many costs no confidence.

Where a share p of N tokens was wrong, a share of `risk` or more shows itself so small with a probability of at most
(Hoeffding 1963; the test of both papers)

    exp(-N* kl(p, risk))        kl(p, q) = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q))        for p < risk, else 1

with N* = N were tokens independent. They are not: a sequence on which the exit errs is likely to have it err again. So whole
sequences are the units. From the variance of wrong tokens between sequences comes the design effect, how many tokens of a
sequence count as one (Kish 1965; Korn and Graubard 1998), and N* = N / max(1, design effect). The bound holds for every
number of tokens; that the clustering is estimated makes the promise one for ten sequences and more, and for sequences like
those of the calibration.

What is kept is sums over sequences, for thresholds k / STEPS: they are as many after a million sequences as after one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from fathomlm.decode.threshold_beta import check_number
from fathomlm.errors import require

STEPS = 200
"""Thresholds to choose from are 0, 1 / STEPS, ..., 1."""
THRESHOLDS = [at / STEPS for at in range(STEPS)]


def _zeros() -> list[int]:
    return [0] * STEPS


@dataclass(slots=True, kw_only=True)
class Texts:
    """Tokens and wrong tokens of sequences. Lists have an entry for each threshold below 1."""

    count: int = 0
    tokens: int = 0
    tokens_squared: int = 0
    """The sum over sequences, as of the two others."""
    wrong: list[int] = field(default_factory=_zeros)
    """Tokens that would be wrong at this threshold."""
    wrong_squared: list[int] = field(default_factory=_zeros)
    wrong_tokens: list[int] = field(default_factory=_zeros)
    """The product of a sequence's wrong tokens and its tokens."""
    seen: list[int] = field(default_factory=_zeros)
    """All tokens, at the largest threshold that each of them is above."""
    open_tokens: int = 0
    """Of the sequence that has not ended."""
    open_wrong: list[int] = field(default_factory=_zeros)
    """Its disagreements, at the largest threshold that each of them is above."""

    def __post_init__(self) -> None:
        for name in ("count", "tokens", "tokens_squared", "open_tokens"):
            check_number(name, getattr(self, name), 0, integer=True)
        for name in ("wrong", "wrong_squared", "wrong_tokens", "seen", "open_wrong"):
            values = getattr(self, name)
            require(isinstance(values, list) and len(values) == STEPS, name, f"a list of {STEPS} counts", values)
            for value in values:
                check_number(name, value, 0, integer=True)
            setattr(self, name, list(values))  # not shared with the record that they were read from
        falling = all(more >= less for more, less in zip([self.tokens, *self.wrong], self.wrong, strict=False))
        require(falling, "wrong", f"counts that fall from at most {self.tokens}", self.wrong)

    def add(self, confidence: float, agreed: bool) -> None:
        """A token of the sequence that runs."""
        at = max(bisect_left(THRESHOLDS, confidence) - 1, 0)  # at threshold 0 every token exits, also one of confidence 0
        self.open_tokens += 1
        self.open_wrong[at] += not agreed
        self.seen[at] += 1

    def end(self) -> None:
        """The sequence is over; one without tokens does not count."""
        tokens, wrong = self.open_tokens, list(accumulate(reversed(self.open_wrong)))[::-1]
        self.open_tokens, self.open_wrong = 0, _zeros()
        if not tokens:
            return
        self.count += 1
        self.tokens += tokens
        self.tokens_squared += tokens * tokens
        for at, many in enumerate(wrong):
            if not many:
                break
            self.wrong[at] += many
            self.wrong_squared[at] += many * many
            self.wrong_tokens[at] += many * tokens

    def share(self, at: int) -> float:
        """The part of all tokens that would be wrong at threshold at / STEPS."""
        return self.wrong[at] / self.tokens if self.tokens and at < STEPS else 0.0

    def exiting(self, at: int) -> float:
        """The part that would exit."""
        return sum(self.seen[at:]) / (sum(self.seen) or 1)

    def effective(self, at: int) -> float:
        """How many independent tokens would say as much about this share as these sequences do."""
        p = self.share(at)
        if self.count < 2 or not 0 < p < 1:
            return float(self.tokens)
        squares = self.wrong_squared[at] - 2 * p * self.wrong_tokens[at] + p * p * self.tokens_squared
        design = self.count / (self.count - 1) * squares / (self.tokens * p * (1 - p))
        return self.tokens / max(1.0, design)

    def p_value(self, at: int, risk: float) -> float:
        """How likely so few are wrong where the share is in truth `risk` or more."""
        return math.exp(-self.effective(at) * _divergence(min(self.share(at), risk), risk))

    def bound(self, at: int, level: float) -> float:
        """What the share stays below with this confidence: the smallest risk whose p-value is at most 1 - level."""
        p, effective = self.share(at), self.effective(at)
        low, high = p, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            enough = effective * _divergence(p, middle) >= -math.log1p(-level)
            low, high = (low, middle) if enough else (middle, high)
        return high

    def threshold(self, risk: float, level: float) -> float:
        """The smallest at and above which every threshold passes the test; 1.0, where nothing exits, needs none."""
        for at in range(STEPS - 1, -1, -1):
            if self.p_value(at, risk) > 1 - level:
                return (at + 1) / STEPS
        return 0.0


def _divergence(p: float, q: float) -> float:
    """Of a coin that shows p from one that shows q, in nats."""
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)
