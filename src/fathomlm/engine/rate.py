"""How fast a count has grown lately."""

from __future__ import annotations

from collections import deque


class Rate:
    """Growth a second over the last `window` seconds of a count that begins at 0 and never falls.

    It has to be told the count now and then, and remembers about as many values as it is told within a window.
    """

    def __init__(self, now: float, window: float = 10.0) -> None:
        self.window = window
        self._begun = now
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def note(self, now: float, total: int) -> None:
        """The count is `total` now. Times do not go back."""
        self._samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window:
            self._samples.popleft()

    def at(self, now: float) -> float:
        """The count may have stood still since the last note: time passes all the same."""
        since = now - self.window
        before = max((total for told, total in self._samples if told <= since), default=0)
        span = min(self.window, now - self._begun)
        return (self._samples[-1][1] - before) / span if span > 0 else 0.0
