"""A training checkpoint's record, `training/state.json`: what it holds, and whether the checkpoint is what was written.

The record has the size and checksum of every other file of its checkpoint, and a checksum of its own. All are compared
before anything is loaded: a flipped bit in weights or optimizer would otherwise go on as another run, unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fathomlm.checkpoints.writing import SEAL, checksum, is_sealed, seal
from fathomlm.errors import CheckpointError, TrainingError
from fathomlm.fields import Fields, shown
from fathomlm.jsonfile import read_object

STATE = "training/state.json"
FORMAT = 2
UNVERIFIED = 1
"""The format before there were checksums; it is still read."""
THREADS = 4
"""Files whose checksums are taken at the same time."""
MAX_BYTES = 256 << 20
"""Of state.json, which has some numbers and a checksum for each weight and file."""
MAX_RANKS = 1 << 20


class UnknownFormat(CheckpointError):
    """A whole checkpoint of another version of FathomLM: nothing is wrong with it, so nothing is to take its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a resumed run compares itself with, and where its exits are."""

    steps: int
    warmup: int
    exits: dict[str, float]
    """The last validation losses."""
    data: str
    """The fingerprint of the training tokens."""


@dataclass(slots=True)
class TrainingProgress:
    """How far a run is: all that changes from step to step outside the model and the optimizer."""

    step: int = 0
    """Optimizer steps done."""
    rows: int = 0
    """Rows of data read, over all ranks; with the seed, this is the whole state of the data."""
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    """Steps whose loss was not finite, in all."""
    best: float | None = None
    best_step: int | None = None
    validation: float | None = None
    extra: RunFacts = field(default_factory=lambda: RunFacts(steps=0, warmup=0, exits={}, data=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum:
    """What a file is known by."""

    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The contents of state.json."""

    progress: TrainingProgress
    ranks: int
    """How many wrote the checkpoint; each has a part of the optimizer's state."""
    optimizer: dict[str, dict[str, float]]
    """The optimizer's plain numbers, by the name of the weight."""
    recipe: dict[str, Any]
    files: dict[str, FileChecksum] = field(default_factory=dict)
    """By path within the checkpoint; empty in those that were written before there were checksums."""

    @property
    def verifiable(self) -> bool:
        return bool(self.files)

    def problem(self) -> str | None:
        """What no run writes, although each field has its type."""
        progress, extra = self.progress, self.progress.extra
        counts = [progress.step, progress.rows, progress.tokens, progress.skipped, progress.best_step or 0, self.ranks - 1]
        counts += [extra.steps, extra.warmup, *(entry.bytes for entry in self.files.values())]
        if min(counts) < 0 or not progress.seconds >= 0 or self.ranks > MAX_RANKS:
            return "a number is out of range"
        strange = next((name for name in self.files if Path(name).is_absolute() or ".." in Path(name).parts), None)
        return None if strange is None else f"{shown(strange)} is not a file within the checkpoint"

    def write(self, directory: Path) -> None:
        record = json.dumps(seal({"format": FORMAT, **asdict(self)}), indent=1)
        (directory / STATE).write_text(record, encoding="utf-8")


def file_checksums(directory: Path, names: Iterable[str]) -> dict[str, FileChecksum]:
    """Size and checksum of some files of a directory."""
    names = sorted(names)
    files = [directory / name for name in names]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(checksum, files))
    return {
        name: FileChecksum(bytes=file.stat().st_size, blake2b=digest)
        for name, file, digest in zip(names, files, found, strict=True)
    }


def part_name(rank: int, ranks: int) -> str:
    """The file of a rank's part of the optimizer's state."""
    return f"training/optimizer-{rank:05d}-of-{ranks:05d}.safetensors"


def file_names(directory: Path) -> list[str]:
    """All files of a checkpoint but its record, as the record names them.

    Hidden files are not part of one: safetensors writes `.tmp…` first and renames it, and another rank may be doing so now.
    """
    found = (file for file in directory.rglob("*") if not file.name.startswith(".") and file.is_file())
    return sorted(name for file in found if (name := file.relative_to(directory).as_posix()) != STATE)


def read_state(directory: Path) -> TrainingState:
    """The record of a training checkpoint, itself verified. `verify` compares the files with it."""
    path = directory / STATE
    if not path.exists():
        raise CheckpointError(f"{directory} is not a training checkpoint (missing {STATE})")
    # A loss that is not finite is in the record as it was.
    fields = read_object(path, error=CheckpointError, max_bytes=MAX_BYTES, nonfinite=True)
    number = fields.raw("format")
    # A record of the first format has no checksum; one that has a checksum is held to it, whatever its format says.
    if (SEAL in fields or number == FORMAT) and not is_sealed(dict(fields.values)):
        raise CheckpointError(f"{path} was altered since it was written (wrong checksum)")
    if number not in (UNVERIFIED, FORMAT):
        raise UnknownFormat(f"{directory} has format {number}; this version reads {UNVERIFIED} and {FORMAT}")
    values = {name: value for name, value in fields.values.items() if name not in ("format", SEAL)}
    state = Fields(values, str(path), error=CheckpointError).build(TrainingState)
    if (problem := state.problem()) is not None:
        raise CheckpointError(f"{path}: {problem}")
    return state


def verify(directory: Path) -> TrainingState:
    """The record of a checkpoint all of whose files are as they were written; sizes first, which are known at once."""
    state = read_state(directory)
    if not state.verifiable:
        _check_shapes(directory, state)
    for name, entry in state.files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != entry.bytes:
            raise CheckpointError(f"{file} has {size:,} bytes in place of {entry.bytes:,}")
    try:
        found = file_checksums(directory, state.files)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror or error})") from error
    for name, entry in state.files.items():
        if found[name] != entry:
            raise CheckpointError(f"{directory / name} was altered since it was written (wrong checksum)")
    return state


def _check_shapes(directory: Path, state: TrainingState) -> None:
    """What can be said of a checkpoint without checksums: its files are there, not cut, and have sound headers."""
    parts = [part_name(rank, state.ranks) for rank in range(state.ranks)]
    shards = [file.name for file in sorted(directory.glob("model*.safetensors"))] or ["model.safetensors"]
    for name in (*shards, *parts, "training/random.safetensors"):
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is missing")
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{directory / name} is corrupt or truncated ({error})") from error


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints of a run, by step. Each has its name, so it was whole when it was written; `verify` says if it is."""
    found = (path for path in checkpoints.glob("step-" + "[0-9]" * 8) if path.is_dir())
    return {int(path.name.removeprefix("step-")): path for path in sorted(found)}


def check_fresh(directory: Path, saved: Iterable[int], resume: bool) -> None:
    """Refuse to overwrite a run."""
    if not resume and (step := max(saved, default=None)) is not None:
        raise TrainingError(f"{directory} holds a run at step {step}; --resume continues it, --out names another")
