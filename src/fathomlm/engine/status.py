"""Where an asyncio engine stands, counted over every engine that it has had, and how fast it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from fathomlm.engine.scheduler import Counters
from fathomlm.engine.slot_records import Totals

KEPT = 100
"""Values of a window: more would not change a rate that anybody looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Where an `AsyncEngine` and its engine stand."""

    accepting: bool
    healthy: bool
    failure: str | None
    restarting: bool
    restarts: int
    """How often the engine failed and was built again."""
    in_flight: int
    """Requests that were accepted and have not ended."""
    uptime: float
    """Seconds."""
    tokens_per_second: float
    """Over the last ten seconds, those without work included."""
    counters: Counters
    totals: Totals


def remaining(counters: Counters) -> Counters:
    """What stays of the counts of an engine that is gone: those that only grow."""
    none = (0,) * len(counters.pages_used)
    return replace(counters, queued=0, prefilling=0, running=0, pages_used=none, pages_cached=none)


def zero(like: Counters) -> Counters:
    """The counts before the first engine."""
    return replace(remaining(like), preemptions=0, prefix_hits=0, evictions=0)


def summed(before: Counters, now: Counters) -> Counters:
    """Those of the engine that runs, on top of those before it."""
    return replace(
        now, preemptions=before.preemptions + now.preemptions, prefix_hits=before.prefix_hits + now.prefix_hits,
        evictions=before.evictions + now.evictions,
    )  # fmt: skip


class Rate:
    """Growth a second over the last `window` seconds of a count that begins at 0 and never falls.

    It has to be told the count now and then, and remembers about `KEPT` values, however often it is told.
    """

    def __init__(self, now: float, window: float = 10.0) -> None:
        self.window = window
        self._begun = now
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def note(self, now: float, total: int) -> None:
        """The count is `total` now. Times do not go back."""
        samples, close = self._samples, self.window / KEPT
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < close:
            samples.pop()
        samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window:
            self._samples.popleft()

    def at(self, now: float) -> float:
        """The count may have stood still since the last note: time passes all the same."""
        since = now - self.window
        before = max((total for told, total in self._samples if told <= since), default=0)
        span = min(self.window, now - self._begun)
        return (self._samples[-1][1] - before) / span if span > 0 else 0.0
