"""What an estimator of thresholds keeps of the tokens it has seen: the confidences of each class of them, with the Beta
distribution of the same moments (thesis 2.5.3), and for the rule `risk` how many were wrong in each sequence.

That rule makes a promise: the share of wrong tokens stays below a target, with a stated confidence.

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
number of tokens. The clustering is estimated, so that the promise is one for sequences like those of the calibration, and
for enough of them that sequences on which the exit errs often are among them.

What is kept is sums over sequences, for thresholds k / STEPS: they are as many after a million sequences as after one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from fathomlm.errors import require
from fathomlm.options import check, option

BINS = 50
CLIP = 1e-4
"""Confidences count as at least this and at most 1 minus this: at 0 and 1 the density of a Beta is 0 or infinite."""
WIDEST, NARROWEST = 1e-4, 1e6
"""The range of alpha + beta. The upper end is for samples that are all equal, the lower for rounding."""
STEPS = 200
"""Thresholds to choose from are 0, 1 / STEPS, ..., 1."""
THRESHOLDS = [at / STEPS for at in range(STEPS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beta:
    alpha: float = option(ge=CLIP * WIDEST / 2)
    beta: float = option(ge=CLIP * WIDEST / 2)

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of_moments(cls, mean: float, variance: float) -> Beta:
        """The Beta of this mean and variance; one of the mean where no Beta has both."""
        mean = clipped(mean)
        total = mean * (1 - mean) / variance - 1 if variance > 0 else NARROWEST
        total = min(max(total, WIDEST), NARROWEST)
        return cls(alpha=mean * total, beta=(1 - mean) * total)

    @property
    def log_scale(self) -> float:
        """The logarithm of the factor that makes the area 1. The Gamma functions themselves overflow from 172 on."""
        return math.lgamma(self.alpha + self.beta) - math.lgamma(self.alpha) - math.lgamma(self.beta)

    def density(self, c: float) -> float:
        c = clipped(c)
        return math.exp(self.log_scale + (self.alpha - 1) * math.log(c) + (self.beta - 1) * math.log1p(-c))


@dataclass(slots=True, kw_only=True)
class Samples:
    """The confidences of one class: Welford's running moments, and a histogram for pictures."""

    count: int = option(0, ge=0)
    mean: float = option(0.0, ge=0, le=1)
    m2: float = option(0.0, ge=0)
    """The sum of squared distances from the mean."""
    bins: list[int] = option([0] * BINS, ge=0)

    def __post_init__(self) -> None:
        check(self)
        require(self.count > 0 or self.mean == self.m2 == 0, "mean and m2", "0 without samples", (self.mean, self.m2))
        require(len(self.bins) == BINS, "bins", f"a list of {BINS} counts", self.bins)
        require(sum(self.bins) == self.count, "bins", f"counts that sum to {self.count}", self.bins)

    @property
    def variance(self) -> float:
        return self.m2 / self.count if self.count else 0.0

    def add(self, confidence: float) -> None:
        self.bins[min(max(int(confidence * BINS), 0), BINS - 1)] += 1
        c = clipped(confidence)
        self.count += 1
        before = c - self.mean
        self.mean += before / self.count
        self.m2 += before * (c - self.mean)

    def fit(self) -> Beta:
        """Uniform without samples."""
        return Beta.of_moments(self.mean, self.variance) if self.count else Beta(alpha=1.0, beta=1.0)


def clipped(c: float) -> float:
    return min(max(c, CLIP), 1 - CLIP)


@dataclass(slots=True, kw_only=True)
class Texts:
    """Tokens and wrong tokens of sequences. Lists have an entry for each threshold below 1."""

    count: int = option(0, ge=0)
    tokens: int = option(0, ge=0)
    tokens_squared: int = option(0, ge=0)
    """The sum over sequences, as of the two others."""
    wrong: list[int] = option([0] * STEPS, ge=0)
    """Tokens that would be wrong at this threshold."""
    wrong_squared: list[int] = option([0] * STEPS, ge=0)
    wrong_tokens: list[int] = option([0] * STEPS, ge=0)
    """The product of a sequence's wrong tokens and its tokens."""
    seen: list[int] = option([0] * STEPS, ge=0)
    """All tokens, at the largest threshold that each of them is above."""
    open_tokens: int = option(0, ge=0)
    """Of the sequence that has not ended."""
    open_wrong: list[int] = option([0] * STEPS, ge=0)
    """Its disagreements, at the largest threshold that each of them is above."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("wrong", "wrong_squared", "wrong_tokens", "seen", "open_wrong"):
            values = getattr(self, name)
            require(len(values) == STEPS, name, f"a list of {STEPS} counts", values)
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
        self.open_tokens, self.open_wrong = 0, [0] * STEPS
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
