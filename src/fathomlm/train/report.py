"""What a run tells: a line of JSON for every record, always; TensorBoard by default; Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from fathomlm.checkpoints.assemble import OnProgress
from fathomlm.checkpoints.heartbeat import Heartbeat
from fathomlm.checkpoints.writing import make_directories, sync_directory, whole_file
from fathomlm.errors import DataError, OptionError, writing
from fathomlm.jsonfile import parse_object
from fathomlm.train.recipe import Recipe

Record = dict[str, Any]
MAX_LINE = 1 << 20
"""Bytes of a line; a record has hundreds."""


class Watcher(Protocol):
    """Who follows a run: the command line's progress bar, or a test."""

    def step(self, step: int, total: int, live: Record) -> None: ...

    def record(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...


class SilentWatcher:
    """A watcher that looks away."""

    def step(self, step: int, total: int, live: Record) -> None: ...

    def record(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...


def measuring(watcher: Watcher) -> OnProgress:
    """Tells a watcher, every half minute, how far the measurement of a source's layers is."""
    heartbeat = Heartbeat(bar=False)

    def tell(done: int, total: int) -> None:
        if heartbeat.due():
            watcher.note(f"measuring layers: {done:,} of {total:,}")

    return tell


class Reporter:
    """The records of one run, written by its first rank."""

    def __init__(self, directory: Path, recipe: Recipe, *, after_step: int) -> None:
        """Records of steps after `after_step` belong to a future that a resumed run will live again: they are dropped."""
        self._path = directory / "metrics.jsonl"
        with _writing(self._path):
            make_directories(directory)
            self.dropped = _keep_until(self._path, after_step)
            """What is to be said of lines that could not be read; None where there were none."""
            self._file = self._path.open("a", encoding="utf-8")
            sync_directory(directory)
        self._board = _tensorboard(directory, after_step) if recipe.log.tensorboard else None
        self._wandb = _wandb(recipe, directory, after_step) if recipe.log.wandb is not None else None

    def write(self, record: Record) -> None:
        record = strict(record)
        numbers = _flat(record)
        with _writing(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def sync(self) -> None:
        """Wait until all records so far are on the disk."""
        with _writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # the disk is full, which `write` has reported already
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(path, "; --resume continues from the last checkpoint")


def read_records(path: Path) -> list[Record]:
    """The records of a metrics file. Lines that are no records are passed over: a run that was killed leaves its last one
    unfinished, a power cut may leave zeros."""
    return _scan(path)[0]


def _scan(path: Path) -> tuple[list[Record], int]:
    """The records, and how many lines are none, not counting a last one that was begun."""
    records, unreadable = [], 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            if not line.strip():
                continue
            try:
                fields = parse_object(line, str(path), error=DataError, nonfinite=True)
                fields.integer("step", at_least=0)
                fields.text("kind")
            except DataError:
                unreadable += line.endswith(b"\n") or line.strip(b"\0")[:1] not in (b"", b"{")
                continue
            records.append(dict(fields.values))
    return records, unreadable


def _keep_until(path: Path, step: int) -> str | None:
    """Drop the records of later steps, and what is no record; a copy of the latter is kept, and reported."""
    if not path.exists():
        return None
    records, unreadable = _scan(path)
    copy = path.with_name(f"{path.name}.damaged")
    if unreadable:
        with whole_file(copy) as temporary:
            shutil.copyfile(path, temporary)
    kept = [record for record in records if record["step"] <= step]
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    return f"{unreadable:,} lines of {path} are no records and were dropped; {copy.name} has them" if unreadable else None


def strict(value: Any) -> Any:
    """JSON has no infinity and no NaN: what is not finite is null."""
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: Record) -> dict[str, float]:
    """A record's numbers under TensorBoard's kind of names."""
    kind = record["kind"]
    numbers = {f"{kind}/{key}": value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
    for group in ("parts", "exits"):
        inner = record.get(group, {}).items()
        numbers |= {f"{kind}/{group}/{key}": value for key, value in inner if value is not None}
    return numbers


def _tensorboard(directory: Path, after_step: int) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=after_step + 1)


def _wandb(recipe: Recipe, directory: Path, after_step: int) -> Any:
    """The run there, which a resumed run goes on writing to: its name is kept in the directory. What it says again of steps
    that were told before, W&B leaves out."""
    try:
        import wandb
    except ImportError:
        raise OptionError("log.wandb is set, but the wandb package is not installed (pip install wandb)") from None
    place = directory / "wandb-id.txt"
    if not (after_step and place.exists()):
        with _writing(place), whole_file(place) as temporary:
            temporary.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    known = place.read_text(encoding="utf-8").strip()
    return wandb.init(project=recipe.log.wandb, name=recipe.name, id=known, dir=str(directory), resume="allow")
