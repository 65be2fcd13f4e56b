"""Combinations of options that meet in pairs. Most faults need one option or two together, so a test over three axes or more
runs a covering array of them and not their product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations, one value of each axis, in which any two values of any two axes are met together.

    Greedy: the combination that meets most new pairs comes next, the earliest of the product where several do. So it is the
    same in every run, and of two axes it is the product.
    """
    values = [list(axis) for axis in axes]
    product_of = list(product(*(range(len(axis)) for axis in values)))
    pairs = {case: {((a, case[a]), (b, case[b])) for a, b in combinations(range(len(case)), 2)} for case in product_of}
    missing = set().union(*pairs.values())
    found: list[tuple[int, ...]] = []
    while missing:
        found.append(max(product_of, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[found[-1]]
    return [tuple(axis[at] for axis, at in zip(values, case, strict=True)) for case in sorted(found)]


def in_turn(first: Iterable[Any], second: Sequence[Any], turn: int) -> list[tuple[Any, Any]]:
    """Each value of `first` with one of `second`, another one each turn: over as many tests as `second` has values all
    pairs are met, and each test still sees every value."""
    return [(value, second[(at + turn) % len(second)]) for at, value in enumerate(first)]


def cover(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over `pairwise` combinations of these arguments."""
    return pytest.mark.parametrize(tuple(axes), pairwise(*axes.values()))
