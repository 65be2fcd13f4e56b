"""Progress on standard error: a bar with rate and time left on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Tick = Callable[[int, int], None]


@contextmanager
def layer_bar(what: str, unit: str = "layers") -> Iterator[Tick]:
    """A bar that is told (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def say(text: str) -> None:
    """What is being done now, a line."""
    print(text, file=sys.stderr, flush=True)


def amount(number: float, unit: str = "") -> str:
    """A number for people: 134.5M, 98.4 MB."""
    for size, letter in ((1e12, "T"), (1e9, "B" if not unit else "G"), (1e6, "M"), (1e3, "K" if not unit else "k")):
        if abs(number) >= size:
            gap = " " if unit else ""
            return f"{number / size:.4g}{gap}{letter}{unit}"
    return f"{number:g}{' ' if unit else ''}{unit}"
