from __future__ import annotations

import math
import random
from statistics import stdev

import pytest

from fathomlm.lab.study.differences import Difference, decide, difference, holm, p_value, residual, student_p, t_95


def test_a_pair_alone_has_the_paired_t_interval() -> None:
    one, other = {0: 3.0, 1: 3.2, 2: 3.1}, {0: 3.1, 1: 3.5, 2: 3.3}
    found = difference(one, other)
    gaps = [one[seed] - other[seed] for seed in one]
    assert found is not None
    assert found.mean == pytest.approx(sum(gaps) / 3)
    assert found.half == pytest.approx(4.302653 * stdev(gaps) / math.sqrt(3))
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
    assert found.half == pytest.approx(4.302653 * spread.deviation)


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


def gap(mean: float, half: float | None, freedom: int = 4) -> Difference:
    return Difference(mean=mean, seeds=2, half=half, freedom=freedom)


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


def test_a_spread_of_few_degrees_of_freedom_decides_nothing() -> None:
    assert decide(gap(-0.1, 0.05, freedom=3), -math.inf, 0.0) == "not resolved at this scale"
    assert p_value(gap(-0.1, 0.05, freedom=3), -math.inf, 0.0) is None
    texts = Difference(mean=-0.1, seeds=1, half=None, freedom=0, interval=(-0.15, -0.05))
    assert decide(texts, -math.inf, 0.0) == "confirmed", "an interval that is not of seeds has its own"


@pytest.mark.parametrize("freedom", [4, 5, 15, 40])
@pytest.mark.parametrize(("mean", "bounds"), [(-0.1, (-math.inf, 0.0)), (0.1, (-math.inf, 0.0)), (0.02, (-0.1, 0.1))])
def test_the_p_value_is_the_level_at_which_the_verdict_is_only_just_given(
    freedom: int, mean: float, bounds: tuple[float, float]
) -> None:
    distance = min(abs(mean - bound) for bound in bounds)
    for half in (0.999 * distance, 1.001 * distance):
        found = gap(mean, half, freedom)
        level = p_value(found, *bounds)
        assert level is not None
        assert level == pytest.approx(0.05, rel=0.02)
        assert (level < 0.05) == (decide(found, *bounds) != "not resolved at this scale")
    assert p_value(gap(mean, 0.0, freedom), *bounds) == 0.0
    assert p_value(None, *bounds) is None


def test_intervals_of_texts_are_taken_to_be_normal() -> None:
    found = Difference(mean=-1.0, seeds=1, half=None, freedom=0, interval=(-1.98, -0.02))
    assert p_value(found, -math.inf, 0.0) == pytest.approx(0.0455, abs=1e-3)


def test_p_of_students_t_is_that_of_tables() -> None:
    """Against tables: the quantiles of 0.10, 0.05 and 0.001, two-sided."""
    tables = {1: (6.314, 12.706, 636.62), 2: (2.920, 4.303, 31.599), 5: (2.015, 2.571, 6.869), 16: (1.746, 2.120, 4.015)}
    for freedom, quantiles in tables.items():
        for t, level in zip(quantiles, (0.10, 0.05, 0.001), strict=True):
            assert student_p(t, freedom) == pytest.approx(level, rel=2e-3)
            assert student_p(-t, freedom) == student_p(t, freedom)
    assert student_p(0.0, 3) == 1.0
    assert student_p(1.96, 100_001) == pytest.approx(0.05, abs=1e-4)


def test_students_t_falls_to_the_normal_limit() -> None:
    values = [t_95(freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert [round(t_95(freedom), 3) for freedom in (1, 2, 3, 30, 60)] == [12.706, 4.303, 3.182, 2.042, 2.000]


def test_holm_tests_the_smallest_against_all_and_never_reverses() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_after_holm_s_correction_nothing_is_called_more_often_than_once_in_twenty_times() -> None:
    draw, called = random.Random(1), 0
    for _ in range(400):
        runs = [{seed: draw.gauss(0, 0.1) for seed in range(2)} for _ in range(10)]
        found = [p_value(difference(runs[0], other, runs), -math.inf, 0.0) for other in runs[1:]]
        called += any(level is not None and level < 0.05 for level in holm(found))
    assert called / 400 < 0.07
