"""An engine that stands still when a test wants it to, so that no test depends on who of two threads is faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fathomlm.engine.engine import Engine


@contextmanager
def held(engine: Engine, after: int = 8) -> Iterator[threading.Event]:
    """The engine takes `after` steps and then none, until the event is set or the block is left. It still takes requests and
    cancels them meanwhile."""
    step, goes_on, steps = engine.step, threading.Event(), iter(range(after))

    def held_step() -> None:
        if goes_on.is_set() or next(steps, None) is not None:
            step()
        else:
            time.sleep(0.001)  # leave the machine to whoever is waited for

    engine.step = held_step  # type: ignore[method-assign]
    try:
        yield goes_on
    finally:
        goes_on.set()
