"""Sharing strategies: which layer runs at each step."""

from __future__ import annotations

import numpy as np
import pytest

from fathomlm.depth.sharing import STRATEGIES, cycle, cycle_rev, sequence, spread


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        (cycle, [0, 1, 2, 0, 1, 2, 0, 1, 2]),
        (sequence, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (cycle_rev, [0, 1, 2, 0, 1, 2, 2, 1, 0]),
    ],
)
def test_nine_layers_in_three_recursions(strategy, order):
    assert strategy(3, 3) == order


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_one_recursion_is_the_plain_order(name):
    assert STRATEGIES[name].order(5, 1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "ends"), [("cycle", 0), ("sequence", 0), ("cycle-rev", 0), ("middle-cycle", 1), ("middle-sequence", 1)]
)
def test_only_middle_strategies_keep_the_ends_apart(name, ends):
    assert STRATEGIES[name].kept_apart == ends


@pytest.mark.parametrize(
    ("first", "last", "count", "layers"),
    [
        # Gemma 2B, two blocks: the thesis keeps the first and last of 18 and steps between them.
        (0, 17, 9, [0, 2, 4, 6, 8, 11, 13, 15, 17]),
        (0, 17, 6, [0, 3, 7, 10, 14, 17]),
        # SmolLM 360M, middle-cycle in two and three recursions: the shared part of 32 layers.
        (1, 30, 15, [1, 3, 5, 7, 9, 11, 13, 16, 18, 20, 22, 24, 26, 28, 30]),
        (1, 30, 10, [1, 4, 7, 11, 14, 17, 20, 24, 27, 30]),
        # SmolLM 135M in two: the middle place is half-way between 14 and 15, and numpy's rounding error says 15.
        (0, 29, 15, [0, 2, 4, 6, 8, 10, 12, 15, 17, 19, 21, 23, 25, 27, 29]),
        (3, 9, 1, [3]),
        (2, 2, 3, [2, 2, 2]),
    ],
)
def test_spread_picks_layers_evenly_with_both_ends(first, last, count, layers):
    assert spread(first, last, count) == layers


@pytest.mark.parametrize("first", [0, 1])
def test_spread_is_numpy_linspace_rounded(first):
    for layers in range(3, 81):
        for count in range(1, layers + 9):
            expected = np.linspace(first, layers - 1 - first, count).round().astype(int).tolist()
            assert spread(first, layers - 1 - first, count) == expected, (layers, count)
