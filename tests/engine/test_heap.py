"""What garbage collections walk in processes that serve."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fathomlm.engine.heap import YOUNG, collect_heap, settle_heap


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    collect_heap()


def test_a_settled_heap_is_left_out_and_new_objects_are_looked_at_seldom() -> None:
    rarely = gc.get_threshold()[1:]
    settle_heap()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == (YOUNG, *rarely)
    collect_heap()
    assert gc.get_freeze_count() == 0
