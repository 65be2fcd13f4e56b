"""Signals that wait, or that are answered."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM)
"""Those that ask a process to end."""
AGAIN = 0.1
"""Seconds after which an interrupt that came too early is tried again."""


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


@contextlib.contextmanager
def on_signals(answer: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Within, these signals call `answer`, by default those of `ENDS`. Only a main thread may ask for them: in others
    nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, answer) for number in numbers or ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """What answers a signal as Python answers Ctrl-C, but waits until a module that is being imported has been: large
    libraries do not expect it there, and swallow it, make an error of their own of it, or end the process from C++."""
    if not _is_importing(frame):
        raise KeyboardInterrupt
    again = threading.Timer(AGAIN, _send, (number,))
    again.daemon = True
    again.start()


def _send(number: int) -> None:
    """A signal to the main thread, which also ends what it waits for, where there is a way to."""
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
