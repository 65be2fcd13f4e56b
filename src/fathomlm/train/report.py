"""What a run tells: a line of JSON for every record, always; TensorBoard by default; Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import OptionError, OutputError
from fathomlm.train.recipe import Recipe

Record = dict[str, Any]


class Watcher(Protocol):
    """Who follows a run: the command line's progress bar, or a test."""

    def step(self, step: int, total: int, live: Record) -> None: ...

    def record(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...


class Silence:
    """A watcher that looks away."""

    def step(self, step: int, total: int, live: Record) -> None: ...

    def record(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...


class Reporter:
    """The records of one run, written by its first rank."""

    def __init__(self, directory: Path, recipe: Recipe, *, after_step: int) -> None:
        """Records of steps after `after_step` belong to a future that a resumed run will live again: they are dropped."""
        self._path = directory / "metrics.jsonl"
        with _writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            _keep_until(self._path, after_step)
            self._file = self._path.open("a", encoding="utf-8")
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

    def close(self) -> None:
        with suppress(OSError):  # the disk is full, which `write` has said already
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; --resume goes on from the last checkpoint"
        ) from error


def read_records(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that a killed run left unfinished is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_records(path) if record["step"] <= step]
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


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
