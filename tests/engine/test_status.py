"""A count's growth lately, by a clock that the test turns."""

from __future__ import annotations

import pytest

from fathomlm.engine.status import Rate


def test_growth_is_spread_over_the_time_there_was() -> None:
    rate = Rate(now=100.0, window=10.0)
    assert rate.at(100.0) == 0
    rate.note(102.0, 50)
    assert rate.at(102.0) == pytest.approx(25)
    assert rate.at(105.0) == pytest.approx(10)


def test_what_is_older_than_the_window_does_not_count() -> None:
    rate = Rate(now=0.0, window=10.0)
    for second in range(1, 101):
        rate.note(float(second), 7 * second)
    assert rate.at(100.0) == pytest.approx(7)
    assert rate.at(105.0) == pytest.approx(3.5)
    assert rate.at(110.0) == 0
    assert len(rate._samples) <= 12


def test_being_told_often_takes_no_more_room_and_changes_little() -> None:
    rate = Rate(now=0.0, window=10.0)
    for step in range(1, 30_001):
        rate.note(step / 1000, 7 * step)
    assert len(rate._samples) <= 103
    assert rate.at(30.0) == pytest.approx(7000, rel=0.02)


def test_work_after_a_long_rest_is_not_spread_over_the_rest() -> None:
    rate = Rate(now=0.0, window=10.0)
    rate.note(1.0, 1000)
    rate.note(3600.0, 1000)
    rate.note(3601.0, 1030)
    assert rate.at(3601.0) == pytest.approx(3)
