"""Engines of these tests have little room, so that sequences are preempted."""

from __future__ import annotations

import pytest

from fathomlm.engine import sizing


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test says nothing, a KV cache has room for a quarter of what all sequences may need."""
    monkeypatch.setattr(sizing, "CPU_ROOM", 0)
