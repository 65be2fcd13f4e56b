"""Ctrl-C that waits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Within, Ctrl-C waits until the end. A process begun here inherits that, and so is not interrupted before it can say
    that it will not be. Where a system has no such thing, nothing changes."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
