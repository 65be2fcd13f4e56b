"""A training run that is followed, and stopped where it does not fit in its visit's time."""

from __future__ import annotations

import signal
from statistics import median

from fathomlm.lab.study.ledger import Record
from fathomlm.lab.study.queue import Visit
from fathomlm.train.report import Watcher

SETTLED = 30
"""Steps after which a rate is measured: most compiling and recording of graphs is over."""
WINDOW = 10
"""Steps that are timed together; a rate is the median of such windows, which a late compilation does not move."""
RECENT = 9
"""Windows that make up the present rate."""
LEAST_WINDOWS, LEAST_SECONDS = 3, 10.0
"""Windows, and seconds in all of them, before a run may be judged by its rate."""


class Guard:
    """Follows a run and asks it to stop, as Ctrl-C would, when the visit's time is over, or when its rate shows that it
    will not be finished in time and it is not to be split."""

    def __init__(self, inner: Watcher, visit: Visit, tokens_per_step: int, *, split: bool) -> None:
        self._inner, self._visit, self._tokens, self._split = inner, visit, tokens_per_step, split
        self._seen = 0
        self._window: tuple[int, float] | None = None
        """Where the present window began."""
        self._seconds: list[float] = []
        """Of each window."""
        self.stop_requested = False
        self.rate: float | None = None
        """Tokens a second, once that is known."""

    def step(self, step: int, total: int, live: Record) -> None:
        self._inner.step(step, total, live)
        self._seen += 1
        now = self._visit.clock()
        if self._window is None:
            self._window = (step, now) if self._seen >= SETTLED else None
        elif step >= self._window[0] + WINDOW:
            self._seconds.append(now - self._window[1])
            self._window = (step, now)
            self.rate = self._measured()
        needed = 0.0 if self.rate is None or self._split else (total - step) * self._tokens / self.rate
        if not self.stop_requested and step < total and (self._visit.left <= 0 or needed > self._visit.left):
            self.stop_requested = True
            signal.raise_signal(signal.SIGTERM)

    def _measured(self) -> float | None:
        """The rate now or over all windows, whichever is faster: neither a slow beginning, while others compile, nor
        a slow minute later is what the rest of the run will take."""
        if len(self._seconds) < LEAST_WINDOWS or sum(self._seconds) < LEAST_SECONDS:
            return None
        seconds = min(median(self._seconds), median(self._seconds[-RECENT:]))
        return WINDOW * self._tokens / seconds if seconds > 0 else None

    def record(self, record: Record) -> None:
        self._inner.record(record)

    def note(self, text: str) -> None:
        self._inner.note(text)
