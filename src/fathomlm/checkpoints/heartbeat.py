"""Progress for logs: where no bar can be drawn, at most a line every half minute."""

from __future__ import annotations

import sys
import time

EVERY = 30.0
"""Seconds between two lines."""


class Heartbeat:
    """Says when the next line is due; never where a terminal shows a bar. Short work prints nothing."""

    def __init__(self, *, bar: bool) -> None:
        self._bar = bar
        self._begin = self._last = time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        if self._bar or now - self._last < EVERY:
            return False
        self._last = now
        return True

    def printed(self) -> None:
        """Something else told of progress."""
        self._last = time.monotonic()

    def tell(self, text: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - self._begin), 60)
        print(f"{text}, {minutes}:{seconds:02d} min", file=sys.stderr, flush=True)
