"""Ctrl-C at every moment of a piece of work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType, ModuleType
from typing import Any


class InterruptedAt:
    """Ctrl-C before the nth line that a module's functions run, once; of all of them, or of those that are named."""

    def __init__(self, number: int, module: ModuleType, names: Collection[str] = ()) -> None:
        self.left, self._file, self._names = number, module.__file__, names

    def __call__(self, frame: FrameType, event: str, argument: Any) -> InterruptedAt | None:
        if frame.f_code.co_filename != self._file or (self._names and frame.f_code.co_name not in self._names):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted_everywhere(work: Callable[[], object], module: ModuleType, names: Collection[str] = ()) -> Iterator[None]:
    """Do the work again and again, interrupted one line later each time, until it is not interrupted; yields behind each
    interrupt, when what was left is to be checked and taken away."""
    number = 0
    while True:
        number += 1
        before, interrupt = sys.gettrace(), InterruptedAt(number, module, names)
        sys.settrace(interrupt)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupt.left > 0:
            return
        yield
