"""Differences between variants, paired by seed, with 95 % intervals; and the rule that turns them into verdicts.

Runs of one seed share their initialisation and their data, so a seed's luck is common to all variants and falls out of
differences. What is left, the residual of variant and seed, is taken over all variants of a study that have the same seeds:
with two seeds a pair alone would have one degree of freedom, and an interval six times as wide. Where fewer than three
variants share the seeds, the pair's own spread is taken. With one seed there is no interval, and so no order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""
LEAST_VARIANTS = 3
"""That a pooled spread is taken from."""

Verdict = Literal["confirmed", "refuted", "not resolved at this scale", "not run yet"]
BySeed = Mapping[int, float]
"""A metric of one variant by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of two variants over the seeds that both have."""

    mean: float
    seeds: int
    half: float | None
    """Half the width of the 95 % interval; None with one seed."""
    freedom: int
    """Degrees of freedom of the spread."""

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
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
    """What is left of losses when each variant's and each seed's mean is taken out; None where too little is known."""
    shared = sorted(set.intersection(*(set(values) for values in variants))) if variants else []
    V, S = len(variants), len(shared)
    if S < 2 or V < 2:
        return None
    rows = [fmean(values[seed] for seed in shared) for values in variants]
    columns = [fmean(values[seed] for values in variants) for seed in shared]
    whole = fmean(rows)
    squares = sum(
        (values[seed] - row - column + whole) ** 2
        for values, row in zip(variants, rows, strict=True)
        for seed, column in zip(shared, columns, strict=True)
    )
    freedom = (V - 1) * (S - 1)
    return Spread(math.sqrt(squares / freedom), freedom)


def difference(one: BySeed, other: BySeed, among: Sequence[BySeed] = ()) -> Difference | None:
    """`one` less `other`; `among` are all variants of the study under that budget. None without a common seed."""
    shared = sorted(set(one) & set(other))
    if not shared:
        return None
    mean = fmean(one[seed] - other[seed] for seed in shared)
    peers = [values for values in among if set(shared) <= set(values)]
    cut = [{seed: values[seed] for seed in shared} for values in peers]
    pair = [{seed: values[seed] for seed in shared} for values in (one, other)]
    spread = residual(cut if len(cut) >= LEAST_VARIANTS else pair)
    if spread is None:
        return Difference(mean=mean, seeds=len(shared), half=None, freedom=0)
    half = t_95(spread.freedom) * spread.deviation * math.sqrt(2 / len(shared))
    return Difference(mean=mean, seeds=len(shared), half=half, freedom=spread.freedom)


def judge_order(found: Difference | None) -> Verdict:
    """Whether a difference that was claimed to be negative is."""
    if found is None:
        return "not run yet"
    if found.low is None or found.high is None:
        return "not resolved at this scale"
    if found.high < 0:
        return "confirmed"
    return "refuted" if found.low > 0 else "not resolved at this scale"


def judge_same(found: Difference | None, within: float) -> Verdict:
    """Whether a difference that was claimed to be smaller than `within`, either way, is."""
    if found is None:
        return "not run yet"
    if found.low is None or found.high is None:
        return "not resolved at this scale"
    if -within < found.low and found.high < within:
        return "confirmed"
    return "refuted" if found.low > within or found.high < -within else "not resolved at this scale"
