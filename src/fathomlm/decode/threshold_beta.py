"""The confidences of one class of tokens, and the Beta distribution of the same moments (thesis 2.5.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fathomlm.errors import require

BINS = 50
CLIP = 1e-4
"""Confidences count as at least this and at most 1 minus this: at 0 and 1 the density of a Beta is 0 or infinite."""
WIDEST, NARROWEST = 1e-4, 1e6
"""The range of alpha + beta. The upper end is for samples that are all equal, the lower for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beta:
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            check_number(name, getattr(self, name), CLIP * WIDEST / 2)

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

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """The sum of squared distances from the mean."""
    bins: list[int] = field(default_factory=lambda: [0] * BINS)

    def __post_init__(self) -> None:
        check_number("count", self.count, 0, integer=True)
        check_number("mean", self.mean, 0, 1)
        check_number("m2", self.m2, 0)
        require(self.count > 0 or self.mean == self.m2 == 0, "mean and m2", "0 without samples", (self.mean, self.m2))
        require(isinstance(self.bins, list) and len(self.bins) == BINS, "bins", f"a list of {BINS} counts", self.bins)
        for count in self.bins:
            check_number("a bin", count, 0, integer=True)
        require(sum(self.bins) == self.count, "bins", f"counts that sum to {self.count}", self.bins)
        self.bins = list(self.bins)  # not shared with the record that they were read from

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


def check_number(name: str, value: object, low: float, high: float = 2.0**53, *, integer: bool = False) -> None:
    number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    rule = f"{'an integer' if integer else 'a number'} from {low:g} {'on' if high > 1 else f'to {high:g}'}"
    require(number and low <= value <= high, name, rule, value)  # type: ignore[operator]
