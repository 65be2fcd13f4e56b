from __future__ import annotations

import math
import random
from statistics import stdev

import pytest

from fathomlm.lab.study.differences import Difference, decide, difference, residual, t_95


def test_a_pair_alone_has_the_paired_t_interval() -> None:
    one, other = {0: 3.0, 1: 3.2, 2: 3.1}, {0: 3.1, 1: 3.5, 2: 3.3}
    found = difference(one, other)
    gaps = [one[seed] - other[seed] for seed in one]
    assert found is not None
    assert found.mean == pytest.approx(sum(gaps) / 3)
    assert found.half == pytest.approx(4.303 * stdev(gaps) / math.sqrt(3))
    assert found.freedom == 2


def test_the_seeds_own_luck_falls_out() -> None:
    one, other = {0: 3.0, 1: 4.0}, {0: 3.5, 1: 4.5}
    found = difference(one, other)
    assert found is not None
    assert found.half == pytest.approx(0.0, abs=1e-12)
    assert found.mean == pytest.approx(-0.5)


def test_the_spread_is_of_all_variants_that_have_the_seeds() -> None:
    variants = [{0: 1.0, 1: 1.2}, {0: 2.0, 1: 2.1}, {0: 3.0, 1: 3.3}, {0: 9.0}]
    found = difference(variants[0], variants[1], variants)
    spread = residual(variants[:3])
    assert spread is not None
    assert found is not None
    assert (spread.freedom, found.freedom) == (2, 2)
    # Seed 1 less seed 0 is 0.2, 0.1, 0.3 in the three: half the spread of those is each run's.
    assert spread.deviation == pytest.approx(math.sqrt(0.02 / 2 / 2))
    assert found.half == pytest.approx(4.303 * spread.deviation)


def test_variants_need_not_have_the_same_seeds() -> None:
    # In the first three seed 1 is 0.2, 0.1 and 0.3 above seed 0; the fourth adds seed 2 to the first's alone.
    variants = [{0: 1.0, 1: 1.2, 2: 5.0}, {0: 2.0, 1: 2.1}, {0: 3.0, 1: 3.3}, {2: 7.0}, {}]
    spread = residual(variants)
    assert spread is not None
    assert spread.freedom == 2, "a seed's and a variant's first run say nothing of the spread"
    assert spread.deviation == pytest.approx(math.sqrt(0.02 / 2 / 2))


def test_one_seed_has_the_spread_of_the_others_and_a_wider_interval() -> None:
    variants = [{0: 1.0, 1: 1.2}, {0: 2.0, 1: 2.1}, {0: 3.0, 1: 3.3}, {0: 9.0}]
    one, two = difference(variants[3], variants[0], variants), difference(variants[1], variants[0], variants)
    assert one is not None
    assert two is not None
    assert (one.mean, one.seeds, one.freedom) == (8.0, 1, two.freedom)
    assert one.half is not None
    assert two.half is not None
    assert one.half == pytest.approx(two.half * math.sqrt(2))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw, inside = random.Random(0), {1: 0, 2: 0}
    for _ in range(600):
        luck = [draw.gauss(0, 1) for _ in range(2)]
        runs = [{seed: level + luck[seed] + draw.gauss(0, 0.1) for seed in range(2)} for level in range(6)]
        del runs[5][1]
        for pair in ((1, 0), (5, 0)):
            found = difference(runs[pair[0]], runs[pair[1]], runs)
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            inside[found.seeds] += found.low < pair[0] - pair[1] < found.high
    assert all(0.92 < many / 600 < 0.975 for many in inside.values()), inside


def test_only_common_seeds_are_compared() -> None:
    found = difference({0: 1.0, 1: 2.0}, {1: 2.5, 2: 9.0})
    assert found == Difference(mean=-0.5, seeds=1, half=None, freedom=0)
    assert difference({0: 1.0}, {1: 1.0}) is None


def gap(mean: float, half: float | None) -> Difference:
    return Difference(mean=mean, seeds=2, half=half, freedom=1)


def test_verdicts_follow_from_the_interval_and_its_direction() -> None:
    assert decide(gap(-0.1, 0.05), -math.inf, 0.0) == "confirmed"
    assert decide(gap(0.1, 0.05), -math.inf, 0.0) == "refuted"
    assert decide(gap(-0.1, 0.2), -math.inf, 0.0) == "not resolved at this scale"
    assert decide(gap(-0.1, 0.1), -math.inf, 0.0) == "not resolved at this scale"
    assert decide(gap(-9.0, None), -math.inf, 0.0) == "not resolved at this scale"
    assert decide(None, -math.inf, 0.0) == "not run yet"


def test_sameness_needs_the_whole_interval_inside() -> None:
    assert decide(gap(0.01, 0.02), -0.05, 0.05) == "confirmed"
    assert decide(gap(0.01, 0.06), -0.05, 0.05) == "not resolved at this scale"
    assert decide(gap(0.2, 0.1), -0.05, 0.05) == "refuted"
    assert decide(gap(-0.2, 0.1), -0.05, 0.05) == "refuted"
    assert decide(gap(0.0, None), -0.05, 0.05) == "not resolved at this scale"


def test_students_t_falls_to_the_normal_limit() -> None:
    values = [t_95(freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert t_95(60) == pytest.approx(2.000, abs=0.002)
