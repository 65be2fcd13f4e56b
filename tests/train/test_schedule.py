"""Learning rates against the formulas, step by step."""

from __future__ import annotations

import math

import pytest

from fathomlm.errors import OptionError
from fathomlm.options import check
from fathomlm.train.recipe import ScheduleRecipe
from fathomlm.train.schedule import LearningRate


def rates(total, **fields):
    rate = LearningRate.of(ScheduleRecipe(**fields), total)
    return [rate.at(step) for step in range(total)]


def thesis(t, w, p, d):
    """Thesis 4, appendix on the trapezoid. `t` is counted from 1 in the warm-up, so that the first step learns too."""
    if t < w:
        return (t + 1) / w
    return 1.0 if t < p else 1 - (t - p) / d


@pytest.mark.parametrize(("total", "warmup", "cooldown"), [(40, 4, 0.2), (100, 0.05, 0.2), (7, 1, 6), (10, 0, 0)])
def test_the_trapezoid_is_the_thesis_formula(total, warmup, cooldown):
    w = warmup if warmup >= 1 else round(warmup * total)
    d = cooldown if cooldown >= 1 else round(cooldown * total)
    wanted = [thesis(t, w, total - d, d) for t in range(total)]
    assert rates(total, kind="trapezoid", warmup=warmup, cooldown=cooldown) == pytest.approx(wanted)
    assert wanted[total - d - 1] == 1.0


def test_the_trapezoid_has_one_plateau_for_all_budgets():
    short, long = (rates(total, kind="trapezoid", warmup=5, cooldown=0.2) for total in (50, 200))
    assert short[:40] == long[:40]
    assert LearningRate.of(ScheduleRecipe(kind="trapezoid", cooldown=0.2), 50).plateau_end == 40
    assert short[40] == 1.0
    assert short[41:] == pytest.approx([1 - i / 10 for i in range(1, 10)])


def test_cosine_linear_and_constant():
    total, w = 20, 4
    rise = [0.25, 0.5, 0.75, 1.0]
    done = [i / 16 for i in range(16)]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2 for x in done]
    assert rates(total, kind="cosine", warmup=w, floor=0.1) == pytest.approx(rise + cosine)
    assert rates(total, kind="linear", warmup=w) == pytest.approx(rise + [1 - x for x in done])
    assert rates(total, kind="constant", warmup=w) == rise + [1.0] * 16
    assert rates(total, kind="trapezoid", warmup=w, cooldown=4, floor=0.5)[-4:] == pytest.approx([1, 0.875, 0.75, 0.625])


@pytest.mark.parametrize("kind", ["cosine", "linear", "trapezoid", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 50])
def test_every_step_learns_and_none_too_fast(kind, total):
    for warmup in (0, 0.02, min(2, total)):
        found = rates(total, kind=kind, warmup=warmup)
        assert all(0 < rate <= 1 for rate in found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup": -1}, "schedule.warmup must be >= 0, got -1"),
        ({"kind": "trapezoid", "cooldown": -0.2}, "schedule.cooldown must be >= 0"),
        ({"floor": 1.5}, "schedule.floor must be between 0 and 1, got 1.5"),
        ({"kind": "trapezoid", "warmup": 6, "cooldown": 5}, "lower schedule.warmup or schedule.cooldown, where"),
        ({"warmup": 11}, "a warm-up of 11 steps does not fit into a run of 10: lower schedule.warmup, where 0.1 is a tenth"),
    ],
)
def test_mistakes(fields, message):
    def rate() -> LearningRate:
        schedule = ScheduleRecipe(**fields)
        check(schedule, "schedule.")
        return LearningRate.of(schedule, 10)

    with pytest.raises(OptionError, match=message):
        rate()
