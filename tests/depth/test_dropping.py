"""Which layers stay when some are dropped."""

from __future__ import annotations

import pytest

from fathomlm.depth.dropping import DROPS, kept_layers
from fathomlm.errors import OptionError

INFLUENCE = (0.9, 0.1, 0.2, 0.05, 0.1, 0.8)
ORDER = (4, 0, 2, 3, 5)


@pytest.mark.parametrize(
    ("by", "drop", "kept"),
    [
        ("last", 2, (0, 1, 2, 3)),
        ("stepwise", 2, (0, 2, 3, 5)),
        ("stepwise", 4, (0, 5)),
        ("influence", 1, (0, 1, 2, 4, 5)),
        ("influence", 2, (0, 1, 2, 5)),  # of two alike the earlier one stays
        ("influence", 5, (0,)),
        ("greedy", 1, (0, 1, 2, 3, 5)),
        ("greedy", 3, (1, 3, 5)),
        ("greedy", 5, (1,)),
        ("1,4", 2, (0, 2, 3, 5)),
        ("5, 0", 2, (1, 2, 3, 4)),
        ("3", 1, (0, 1, 2, 4, 5)),
        (None, 1, (0, 1, 2, 4, 5)),
    ],
)
def test_kept_layers(by: str | None, drop: int, kept: tuple[int, ...]) -> None:
    assert kept_layers(6, drop, by, INFLUENCE, ORDER) == kept


@pytest.mark.parametrize("by", DROPS)
def test_dropping_none_keeps_all(by: str) -> None:
    assert kept_layers(6, 0, by, INFLUENCE, ORDER) == tuple(range(6))


def test_without_a_measurement_layers_are_kept_stepwise() -> None:
    assert kept_layers(6, 2) == kept_layers(6, 2, "stepwise")


@pytest.mark.parametrize(
    ("drop", "by", "says"),
    [
        (6, "last", "drop must be between 0 and 5"),
        (-1, "last", "drop must be between 0 and 5"),
        (2, "influence", "requires calibration text"),
        (2, "greedy", "requires calibration text"),
        (2, "influnce", "did you mean 'influence'"),
        (2, "1,4,5", "by names 3 layers, but drop is 2"),
        (2, "1,1", "different layers between 0 and 5, got 1,1"),
        (2, "1,6", "different layers between 0 and 5, got 1,6"),
        (2, "1,-1", "invalid by '1,-1'; choose from influence, greedy, stepwise, last, or name layers"),
        (2, "1;4", "invalid by '1;4'"),
        (2, "", "invalid by ''"),
        (1, "9" * 5000, "invalid by '999"),
    ],
)
def test_refusals(drop: int, by: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        kept_layers(6, drop, by)


def test_an_order_must_be_long_enough() -> None:
    with pytest.raises(OptionError, match="requires an order of 3 layers: measure the activations with greedy=3"):
        kept_layers(6, 3, "greedy", INFLUENCE, ORDER[:2])
