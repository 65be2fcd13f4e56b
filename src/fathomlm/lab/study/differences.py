"""Differences between variants, paired by seed, with 95 % intervals, and what follows from them for a claim.

Runs of one seed share their initialisation and their data, so a seed's luck is common to all variants and falls out of
differences. What is left, the residual of variant and seed, is how much a single run may differ by chance. It is taken over
all runs that were made alike (one study's, and those of studies with the same common settings and budget), by least squares,
so that not all of them need the same seeds: with two seeds a pair alone would have one degree of freedom, and an interval
six times as wide. A pair with one seed has the spread of the others. Where nothing was repeated there is no interval, and so
no order; nor is there one where the spread has fewer than four degrees of freedom, because it is then hardly known itself.

Of twenty differences that are none, one lies outside its interval. So it is also told which differences remain when all
those of a study are tested together (Holm's correction).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np

LEVEL = 0.05
"""A difference is called where chance alone would give one as large in fewer than this part of all studies."""
LEAST_FREEDOM = 4
"""Degrees of freedom below which no difference is called. With four a spread is known within a factor of three, with two
within one of six (95 %), and it is mostly that of other variants than those that are compared."""
Verdict = Literal["confirmed", "refuted", "not resolved at this scale", "not run yet"]
DECIDED: tuple[Verdict, ...] = ("confirmed", "refuted")
BySeed = Mapping[int, float]
"""A metric of one variant by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of two variants over the seeds that both have."""

    mean: float
    seeds: int
    half: float | None
    """Half the width of the 95 % interval; None where no run was repeated."""
    freedom: int
    """Degrees of freedom of the spread."""
    interval: tuple[float, float] | None = None
    """Where it is not of seeds, and so need not lie evenly around the mean."""

    @property
    def known(self) -> bool:
        """Whether it is known well enough how much chance may do."""
        return self.interval is not None or (self.half is not None and self.freedom >= LEAST_FREEDOM)

    @property
    def low(self) -> float | None:
        if self.interval is not None:
            return self.interval[0]
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        if self.interval is not None:
            return self.interval[1]
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of a single run around variant and seed."""

    deviation: float
    freedom: int


def student_p(t: float, freedom: int) -> float:
    """The two-sided p value of Student's t. Without scipy, which nothing else requires: for
    whole degrees of freedom it is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * number / (number + 1)
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return max(0.0, 1 - inside)


@lru_cache
def t_95(freedom: int) -> float:
    """Within so many standard errors Student's t lies in 95 %."""
    low, high = 1.9, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > LEVEL else (low, middle)
    return high


def residual(variants: Sequence[BySeed]) -> Spread | None:
    """What is left of losses when each variant's and each seed's mean is taken out, by least squares; None where runs say no
    more than those means."""
    runs = [(row, seed, value) for row, values in enumerate(variants) for seed, value in values.items()]
    seeds = sorted({seed for _, seed, _ in runs})
    design_RP = np.zeros((len(runs), len(variants) + len(seeds)))
    for at, (row, seed, _) in enumerate(runs):
        design_RP[at, row] = design_RP[at, len(variants) + seeds.index(seed)] = 1.0
    values_R = np.array([value for *_, value in runs])
    fitted_P, _, rank, _ = np.linalg.lstsq(design_RP, values_R, rcond=None)
    freedom = len(runs) - int(rank)
    if freedom < 1:
        return None
    return Spread(math.sqrt(float(((values_R - design_RP @ fitted_P) ** 2).sum()) / freedom), freedom)


def difference(one: BySeed, other: BySeed, among: Sequence[BySeed] = ()) -> Difference | None:
    """`one` less `other`; `among` are all variants that were made alike, these two included. None without a common seed."""
    shared = sorted(set(one) & set(other))
    if not shared:
        return None
    mean = fmean(one[seed] - other[seed] for seed in shared)
    spread = residual(among or (one, other))
    if spread is None:
        return Difference(mean=mean, seeds=len(shared), half=None, freedom=0)
    half = t_95(spread.freedom) * spread.deviation * math.sqrt(2 / len(shared))
    return Difference(mean=mean, seeds=len(shared), half=half, freedom=spread.freedom)


def decide(found: Difference | None, low: float, high: float) -> Verdict:
    """Whether a difference that was claimed to lie between two bounds does."""
    if found is None:
        return "not run yet"
    if not found.known or found.low is None or found.high is None:
        return "not resolved at this scale"
    if low < found.low and found.high < high:
        return "confirmed"
    return "refuted" if found.low > high or found.high < low else "not resolved at this scale"


def p_value(found: Difference | None, low: float, high: float) -> float | None:
    """Two-sided, of a difference being on its own side of two bounds: below 0.05 where `decide` has a verdict. None where it
    is not known how much chance may do. Intervals that are not of seeds are taken to be normal."""
    if found is None or not found.known or found.low is None or found.high is None:
        return None
    distance = min(abs(found.mean - bound) for bound in (low, high))
    half = (found.high - found.low) / 2
    if not half:
        return 0.0 if distance else 1.0
    if found.half is None:
        return math.erfc(distance / half * NormalDist().inv_cdf(1 - LEVEL / 2) / math.sqrt(2))
    return student_p(distance / half * t_95(found.freedom), found.freedom)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P values adjusted by Holm's method for all of them being tested; None stays None."""
    known = sorted((one, at) for at, one in enumerate(p_values) if one is not None)
    found: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (one, at) in enumerate(known):
        worst = max(worst, min(1.0, one * (len(known) - rank)))
        found[at] = worst
    return found


def gap(found: Difference | None) -> str:
    """A difference with its interval, as tables have it."""
    if found is None:
        return "-"
    if found.interval is not None:
        return f"{found.mean:+.2f} ({found.interval[0]:+.2f} to {found.interval[1]:+.2f})"
    return f"{found.mean:+.4f}" + (", no interval" if found.half is None else f" ± {found.half:.4f}")
