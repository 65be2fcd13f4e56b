"""Differences between variants, paired by seed, with 95 % intervals, and what follows from them for a claim.

Runs of one seed share their initialisation and their data, so a seed's luck is common to all variants and falls out of
differences. What is left, the residual of variant and seed, is how much a single run may differ by chance. It is taken over
all runs that were made alike (one study's, and those of studies with the same common settings and budget), by least squares,
so that not all of them need the same seeds: with two seeds a pair alone would have one degree of freedom, and an interval
six times as wide. A pair with one seed has the spread of the others. Where nothing was repeated there is no interval, and so
no order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""
Verdict = Literal["confirmed", "refuted", "not resolved at this scale", "not run yet"]
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


def t_95(freedom: int) -> float:
    """Beyond the table its normal limit, widened to first order."""
    return T_95[freedom - 1] if freedom <= len(T_95) else 1.960 * (1 + 1.21 / freedom)


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
    if found.low is None or found.high is None:
        return "not resolved at this scale"
    if low < found.low and found.high < high:
        return "confirmed"
    return "refuted" if found.low > high or found.high < low else "not resolved at this scale"


def gap(found: Difference | None) -> str:
    """A difference with its interval, as tables have it."""
    if found is None:
        return "-"
    if found.interval is not None:
        return f"{found.mean:+.2f} ({found.interval[0]:+.2f} to {found.interval[1]:+.2f})"
    return f"{found.mean:+.4f}" + (", no interval" if found.half is None else f" ± {found.half:.4f}")
