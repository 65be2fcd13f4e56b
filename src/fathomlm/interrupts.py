"""Signals that wait, or that are answered."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM)
"""Those that ask a process to end."""
AGAIN = 0.1
"""Seconds after which an interrupt that came too early is tried again."""
WAITING = "fathomlm-interrupt"
"""The name of the thread that tries it again."""
PATIENCE = 5.0
"""Seconds that an interrupted program has to clean up, before another interrupt breaks that off too."""
SignalAnswer = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Within, what asks to end waits until the end of the block. A process begun here inherits that for Ctrl-C, and so is
    not interrupted before it can say that it will not be. A signal that this thread blocks goes to another one, of a
    library's, and Python then calls the handler here all the same: so handlers wait, too."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    is_main, blocks = threading.current_thread() is threading.main_thread(), hasattr(signal, "pthread_sigmask")
    interrupts, ends = (signal.getsignal(number) if is_main else None for number in ENDS)
    before = None
    try:  # one within the other: what is put back first may be called at once, and raise
        if callable(interrupts):
            signal.signal(signal.SIGINT, note)
        if callable(ends):
            signal.signal(signal.SIGTERM, note)
        if blocks:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        try:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:
            try:
                if callable(interrupts):
                    signal.signal(signal.SIGINT, interrupts)
            finally:
                if callable(ends):
                    signal.signal(signal.SIGTERM, ends)
        if came:
            signal.raise_signal(max(came))  # SIGTERM ends what may survive Ctrl-C


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.at = time.monotonic()


def interrupt(number: int, frame: FrameType | None) -> None:
    """What answers a signal as Python answers Ctrl-C, but waits until a module that is being imported has been: large
    libraries do not expect it there, and swallow it, make an error of their own of it, or end the process from C++. What
    cleans up behind an interrupt is not interrupted again for a while: people press Ctrl-C twice."""
    if _is_importing(frame):
        _try_again(number)
    elif not _is_ending(sys.exc_info()[1]):
        raise Interrupted


def interrupt_within(function: Callable[..., object]) -> SignalAnswer:
    """The same while `function` runs. Behind it the signals do nothing: whoever called it knows already that it ended, and
    an exception there would find nobody who expects it."""
    code = function.__code__

    def answer(number: int, frame: FrameType | None) -> None:
        if any(each.f_code is code for each in _stack(frame)):
            interrupt(number, frame)

    return answer


def end_without_interrupts(status: int) -> SignalAnswer:
    """What answers signals while a process ends: nothing, at first, so that it can clean up; and later an end at once, with
    that status, for what hangs."""
    begin = time.monotonic()

    def answer(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begin > PATIENCE:
            os._exit(status)

    return answer


def _try_again(number: int) -> None:
    """Send a signal once more in a moment, and of several that came only one."""
    if not any(thread.name == WAITING for thread in threading.enumerate()):
        again = threading.Timer(AGAIN, _send, (number,))
        again.name, again.daemon = WAITING, True
        again.start()


def _send(number: int) -> None:
    """A signal to the main thread, which also ends what it waits for, where there is a way to."""
    threading.current_thread().name = f"{WAITING}-over"  # what this starts may come too early again, before this thread ends
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_importing(frame: FrameType | None) -> bool:
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each in _stack(frame))


def _is_ending(handled: BaseException | None) -> bool:
    """Whether what runs is the end of something that was interrupted just now: `finally`, `except`, `__exit__`."""
    while handled is not None:
        if isinstance(handled, Interrupted) and time.monotonic() - handled.at < PATIENCE:
            return True
        handled = handled.__context__
    return False
