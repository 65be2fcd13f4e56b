"""What garbage collections walk in processes that serve."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fathomlm.engine.heap import YOUNG, collect_heap, settle_heap


class Node:
    def __init__(self) -> None:
        self.itself = self


pytestmark = pytest.mark.usefixtures("whole_collections")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The test run's own heap is frozen, too."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.freeze()


def test_what_was_there_to_stay_is_collected_when_it_is_asked_for() -> None:
    node = Node()
    found = weakref.ref(node)
    settle_heap()
    del node
    gc.collect()
    assert found() is not None
    collect_heap()
    assert found() is None


def test_what_a_process_has_left_out_stays_left_out() -> None:
    """Engines that are built or restarted collect; what was frozen, by us or by others, is not walked again from then on."""
    gc.unfreeze()
    collect_heap()
    assert gc.get_freeze_count() == 0
    settle_heap()
    assert gc.get_freeze_count() > 0
    collect_heap()
    assert gc.get_freeze_count() > 0


def test_new_objects_are_looked_at_seldom() -> None:
    rarely = gc.get_threshold()[1:]
    settle_heap()
    assert gc.get_threshold() == (YOUNG, *rarely)
