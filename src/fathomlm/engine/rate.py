"""How fast a count has grown lately."""

from __future__ import annotations

from collections import deque

KEPT = 100
"""Values of a window: more would not change a rate that anybody looks at."""


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
