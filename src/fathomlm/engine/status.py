"""What a front tells of itself and of its engine, counted over every engine that it has had."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fathomlm.engine.engine import Totals
from fathomlm.engine.scheduler import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a front and its engine stand."""

    accepting: bool
    healthy: bool
    failure: str | None
    restarting: bool
    restarts: int
    """How often the engine broke and was built again."""
    in_flight: int
    """Requests that were taken and have not ended."""
    uptime: float
    """Seconds."""
    tokens_per_second: float
    """Over the last ten seconds, those without work included."""
    counters: Counters
    totals: Totals


def left_of(counters: Counters) -> Counters:
    """What stays of the counts of an engine that is gone: those that only grow."""
    none = (0,) * len(counters.pages_used)
    return replace(counters, queued=0, reading=0, running=0, pages_used=none, pages_cached=none)


def nothing(like: Counters) -> Counters:
    """The counts before the first engine."""
    return replace(left_of(like), preemptions=0, prefix_hits=0, evictions=0)


def since(before: Counters, now: Counters) -> Counters:
    """Those of the engine that runs, on top of those before it."""
    return replace(
        now, preemptions=before.preemptions + now.preemptions, prefix_hits=before.prefix_hits + now.prefix_hits,
        evictions=before.evictions + now.evictions,
    )  # fmt: skip
