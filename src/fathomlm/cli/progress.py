"""Progress on standard error: a bar with rate and time left on a terminal, elsewhere a line every half minute, and
each record of training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from fathomlm.checkpoints.heartbeat import Heartbeat
from fathomlm.sizes import amount

if TYPE_CHECKING:
    from rich.progress import TaskID


class ProgressUpdate(Protocol):
    """Told how much is done, and of how much."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(what: str, unit: str = "layers", *, still: bool = False) -> Iterator[ProgressUpdate]:
    """A bar. A `still` one is drawn only on updates, because a drawing thread takes time from what is measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=not still) as progress:
        task = progress.add_task(what, total=None, note="")
        heartbeat = Heartbeat(bar=not hidden)

        def update(done: int, total: int, note: str = "") -> None:
            if hidden:
                if heartbeat.due():
                    heartbeat.tell(f"{what.strip()}: {done:,} of {total:,} {unit}{note}")
                return
            progress.update(task, completed=done, total=total, note=note, refresh=still)

        yield update


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


class TrainingBar:
    """Loss, tokens/s, MFU, memory and time left. Without a terminal each record is a line of its own."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[live]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._name = name
        self._task: TaskID | None = None
        self._heartbeat = Heartbeat(bar=self._console.is_terminal)
        self._rate: dict[str, Any] = {}
        self.watching = False
        """Whether this rank reports the run."""

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def prepared(self, progress: Any) -> None:
        """The corpus is being made first."""
        if self._task is None:
            self._task = self._bar.add_task("preparing data", total=100, live="")
        share = None if progress.share is None else 100 * progress.share
        self._bar.update(self._task, completed=share or 0, live=f"{amount(progress.tokens)} tokens")
        if self._heartbeat.due():
            self._heartbeat.tell(
                f"preparing data: {amount(progress.tokens)} tokens" + ("" if share is None else f", {share:.0f} %")
            )

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if self._task is None:
            self._task = self._bar.add_task(self._name, total=total, live="")
        self._rate |= {key: live[key] for key in ("tokens_per_s", "mfu", "mfu_sustained", "memory_gb") if key in live}
        now = _live({**self._rate, **live})
        self._bar.update(self._task, description=self._name, completed=step, total=total, live=now)
        if self._heartbeat.due():
            self._heartbeat.tell(f"step {step:,} of {total:,}: {now}")

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "validation":
            exits = "".join(f", after {depth} steps {loss:.4f}" for depth, loss in record["exits"].items())
            self._console.print(f"step {record['step']:,}: validation loss {record['loss']:.4f}{exits}")
        elif not self._console.is_terminal:
            self._console.print(f"step {record['step']:,}: {_live(record)}")
        self._heartbeat.printed()

    def note(self, text: str) -> None:
        self.watching = True
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._console.print(text)


def _live(values: dict[str, Any]) -> str:
    words = [] if values.get("loss") is None else [f"loss {values['loss']:.4f}"]  # the first result comes a step later
    if values.get("tokens_per_s"):
        words.append(f"{amount(values['tokens_per_s'])} tokens/s")
    if values.get("mfu") is not None:
        sustained = values.get("mfu_sustained")
        words.append(f"MFU {values['mfu']:.1%}" + ("" if sustained is None else f" ({sustained:.1%} of sustained)"))
    if values.get("memory_gb") is not None:
        words.append(f"{values['memory_gb']:.1f} GB")
    if values.get("skipped"):
        words.append(f"{values['skipped']} skipped")
    return ", ".join(words)
