"""Workloads are what they say, and the same everywhere."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest

from fathomlm.errors import OptionError
from fathomlm.lab.bench.workload import WORKLOADS, build_workload


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    first, again, other = (build_workload("thesis", 97, requests=50, rate=3.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    for part in ("prompt", "new", "at"):
        assert [getattr(one, part) for one in first.requests] != [getattr(one, part) for one in other.requests]
    # Lengths and moments do not hang on the vocabulary.
    wide = build_workload("thesis", 5000, requests=50, rate=3.0, seed=1)
    assert [(one.new, one.at) for one in wide.requests] == [(one.new, one.at) for one in first.requests]


def test_the_thesis_workload() -> None:
    found = build_workload("thesis", 97)
    lengths = [one.new for one in found.requests]
    assert len(lengths) == 1000
    assert {len(one.prompt) for one in found.requests} == {1}
    assert statistics.mean(lengths) == pytest.approx(256, abs=4 * 64 / 1000**0.5)
    assert statistics.stdev(lengths) == pytest.approx(64, rel=0.1)
    assert 1 <= min(lengths) <= max(lengths) <= 512
    assert {one.at for one in found.requests} == {0.0}
    assert found.longest == 1 + max(lengths)


def test_prompts_cover_the_vocabulary_and_have_the_lengths_they_are_named_after() -> None:
    for name in ("512-2048", "64-256"):
        prompt, new = (int(word) for word in name.split("-"))
        found = build_workload(name, 11, requests=3)
        assert [(len(one.prompt), one.new) for one in found.requests] == [(prompt, new)] * 3
        assert {token for one in found.requests for token in one.prompt} == set(range(11))
        assert len(build_workload(name, 11).requests) == WORKLOADS[name].requests


def test_poisson_arrivals() -> None:
    found = build_workload("thesis", 5, requests=2000, rate=8.0)
    moments = [one.at for one in found.requests]
    gaps = [after - before for before, after in pairwise(moments)]
    assert moments[0] == 0.0
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.15)  # an exponential's mean; an even pace would have 0
    assert (found.arrivals, found.rate) == ("poisson", 8.0)


def test_prompts_from_text_are_its_pieces_in_order() -> None:
    text = list(range(150))
    found = build_workload("64-256", 200, requests=3, text=text)
    assert [one.prompt for one in found.requests] == [tuple(text[:64]), tuple(text[64:128]), tuple(text[:64])]
    assert found.source == "text"


def test_shorter_workloads() -> None:
    found = build_workload("thesis", 97, requests=9, rate=2.0)
    few = found.shortened(4, 250)
    assert [one.new for one in few.requests] == [min(one.new, 250) for one in found.requests[:4]]
    assert {one.at for one in few.requests} == {0.0}
    assert [one.new for one in found.uniform(3, 7).requests] == [7, 7, 7]
    assert found.one_by_one().requests == found.requests


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "tesis"}, "did you mean 'thesis'"),
        ({"requests": 0}, "requests must be >= 1"),
        ({"rate": 0.0}, "must be > 0"),
        ({"rate": float("inf")}, "must be > 0"),
        ({"name": "64-256", "text": [1] * 63}, "64 tokens long, but the text has only 63"),
    ],
)
def test_mistakes_in_a_workload(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_workload(**({"name": "thesis", "vocab": 9} | fields))
