"""The covering arrays that other tests run on: complete, small, and the same in every run."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from pairwise import cover, in_turn, pairwise

AXES: dict[str, list[list[Any]]] = {
    "two": [[1, 2, 3], "ab"],
    "three": [list(range(5)), "abc", [True, False, None]],
    "uneven": [list(range(7)), "ab", "cd", "efg", [None]],
}


def met(cases: list[tuple[Any, ...]]) -> set[Any]:
    width = range(len(cases[0]))
    return {(a, case[a], b, case[b]) for case in cases for a, b in combinations(width, 2)}


@pytest.mark.parametrize("name", AXES)
def test_any_two_values_meet(name: str) -> None:
    axes = AXES[name]
    cases, whole = pairwise(*axes), list(product(*axes))
    assert met(cases) == met(whole)
    assert set(cases) <= set(whole)
    assert len(cases) == len(set(cases))
    assert cases == pairwise(*axes)


def test_it_is_little_more_than_the_two_longest_axes() -> None:
    assert len(pairwise(*AXES["two"])) == 6
    assert len(pairwise(*AXES["three"])) == 15
    assert len(pairwise(*AXES["uneven"])) <= 23
    assert len(pairwise(range(4), range(4), range(4), range(2))) <= 20


def test_turns_pair_all_values() -> None:
    turns = [in_turn("abcde", (1, 2, 3), turn) for turn in range(3)]
    assert [len(turn) for turn in turns] == [5, 5, 5]
    assert {case for turn in turns for case in turn} == set(product("abcde", (1, 2, 3)))


@cover(a=[1, 2], b="xy", c=[True, False])
def test_cover_names_the_arguments(a: int, b: str, c: bool) -> None:
    assert (a in (1, 2), b in "xy", c in (True, False)) == (True, True, True)
