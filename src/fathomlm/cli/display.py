"""What people see: tokens with their spaces and line ends marked and control characters spelled out; and progress on
standard error, a bar with rate and time left on a terminal, elsewhere a line every half minute and each record of training.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from fathomlm.checkpoints.heartbeat import Heartbeat
from fathomlm.sizes import amount

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


NEWLINE, TAB, SPACE = "↵", "⇥", "␣"
PART = "·"
"""Stands for a token that ends within a character; the character stands with the token that completes it."""
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a mark of their own. Some of them would turn round the text that follows."""


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, for a table."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
    return text


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to a text. Joined they are the text, with special tokens by their names."""
    from fathomlm.decode.text import TextStream

    special = frozenset(tokenizer.all_special_ids)
    stream = TextStream(tokenizer)
    found = []
    for token in tokens:
        piece = stream.push(token)
        found.append(piece + str(tokenizer.convert_ids_to_tokens(token)) if token in special else piece)
    if found:
        found[-1] += stream.finish()
    return found


def visible(piece: str) -> str:
    """A piece of running text with its line ends marked and kept; spaces stay spaces."""
    if not piece:
        return PART
    return "".join(_mark(letter, NEWLINE + "\n") for letter in piece)


def label(text: str) -> str:
    """A token in a table, where even its spaces matter."""
    return "".join(_mark(letter, NEWLINE) for letter in text).replace(" ", SPACE)


def _mark(letter: str, newline: str) -> str:
    if letter == "\n":
        return newline
    if letter == "\t":
        return TAB
    return f"⟨{ord(letter):02X}⟩" if unicodedata.category(letter) in UNSEEN else letter


def model_name(source: str) -> str:
    """A short name for a model: its last path part, with the run's for a checkpoint of one (tiny-last)."""
    path = Path(source).expanduser()
    if not path.exists():
        return source.replace("/", "-")
    if path.is_file():
        return path.stem
    parts = [part for part in Path(os.path.abspath(path)).parts if part != "checkpoints"]
    of_run = parts[-1] in ("last", "best") or parts[-1].startswith("step-")
    return "-".join(parts[-2:]) if of_run else parts[-1]


def command_note() -> str:
    """Where the command is, for a shell that would not find it: behind commands to be copied."""
    if shutil.which("fathomlm") is not None:
        return ""
    beside = Path(sys.executable).with_name("fathomlm")
    where = os.path.relpath(beside) if beside.is_file() else "python -m fathomlm"
    return f"\n(your shell does not find fathomlm; here it is {where})"


Rows = list[list[str]]
"""A table: a header, and rows whose first column is a name."""


def output_console() -> Console:
    """Standard output. A reader that goes away (`| head`) is an error as with `print`; rich would end the process with 1."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole()


def print_table(
    rows: Sequence[Sequence[str]],
    title: str | None = None,
    *,
    caption: str | None = None,
    text_columns: int = 1,
    dense: bool = False,
) -> None:
    """The first row is the header. The first `text_columns` are aligned to the left, numbers to the right. A `dense` table
    has less space between columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def plain(text: str | None) -> Text | None:
        return None if text is None else Text(text)

    table = Table(
        title=plain(title),
        caption=plain(caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=dense,
    )
    for column, name in enumerate(rows[0]):
        word = max(map(len, name.split()), default=0)  # a narrow terminal folds cells, and breaks no word of a heading
        table.add_column(name, justify="left" if column < text_columns else "right", overflow="fold", min_width=word)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    output_console().print(table)


class ProgressUpdate(Protocol):
    """Told how much is done, and of how much."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def rich_bar(console: Console, text: str, *, width: int = 40, counted: bool = True, still: bool = False) -> Progress:
    """A bar with some text of its task behind it, and the time that is left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    count = (MofNCompleteColumn(),) if counted else ()
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=width), *count, TextColumn(text), *times)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=not still)


@contextmanager
def progress_bar(what: str, unit: str = "layers", *, still: bool = False) -> Iterator[ProgressUpdate]:
    """A bar. A `still` one is drawn only on updates, because a drawing thread takes time from what is measured."""
    from rich.console import Console

    console = Console(stderr=True)
    hidden = not console.is_terminal
    with rich_bar(console, unit + "{task.fields[note]}", still=still) as progress:
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

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = rich_bar(self._console, "{task.fields[live]}", width=20)
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
