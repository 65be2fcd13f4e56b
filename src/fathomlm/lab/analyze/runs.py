"""The records of training runs, and the few numbers that sum each of them up.

A run is a directory with a metrics.jsonl: one record a line, of kind `train` or `validation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.display import log
from fathomlm.errors import OptionError, is_int, is_number
from fathomlm.train.report import read_records

Record = dict[str, Any]
Points = list[tuple[float, float]]
FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What one run recorded."""

    name: str
    file: Path
    """Where the records are; the recipe lies beside it."""
    train: tuple[Record, ...]
    validation: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in one line; None where it recorded nothing of the kind."""

    run: str
    step: int
    tokens: int
    tokens_per_s: float | None
    """The median of its records, so that a first step that compiles does not count."""
    loss: float | None
    """The training loss of the last record, a single step's (see `training_loss`)."""
    validation: float | None
    """The last validation loss."""
    best: float | None
    """The lowest validation loss."""
    exits: dict[str, float]
    """The last validation loss at each early exit, by the number of steps run before leaving."""


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at some paths: directories of runs, runs, or their metrics files. Each has a name of its own. In a directory
    of runs one that has recorded nothing yet, or cannot be read, does not keep the others from being looked at."""
    files: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        for file in _files(path):
            among_others = path not in (file, file.parent)
            first, before = files.get(file.resolve(), (file, True))
            files[file.resolve()] = first, among_others and before
    names = _names(list(files))
    found, left_out = [], []
    for (file, among_others), name in zip(files.values(), names, strict=True):
        try:
            found.append(_read(file, name))
        except OptionError as error:
            if not among_others:
                raise
            left_out.append(str(error))
    if not found and left_out:
        raise OptionError(left_out[0])
    for why in left_out:
        log(f"left out: {why}")
    return found


def summarise(run: RecordedRun) -> RunSummary:
    last = max((*run.train[-1:], *run.validation[-1:]), key=lambda record: int(record["step"]))
    rates = sorted(value for _, value in points(run.train, "tokens_per_s", lambda record: 0.0))
    losses = [value for _, value in training_loss(run, lambda record: 0.0)]
    validated = [value for _, value in points(run.validation, "loss", lambda record: 0.0)]
    exits = run.validation[-1].get("exits") or {} if run.validation else {}
    return RunSummary(
        run=run.name,
        step=int(last["step"]),
        tokens=int(last["tokens"]),
        tokens_per_s=rates[len(rates) // 2] if rates else None,
        loss=losses[-1] if losses else None,
        validation=validated[-1] if validated else None,
        best=min(validated) if validated else None,
        exits={depth: float(exits[depth]) for depth in sorted(exits, key=int) if exits[depth] is not None},
    )


def points(records: Sequence[Record], field: str, x: Callable[[Record], float]) -> Points:
    """One field over the run, without records that lack it or in which it is not finite. `exits.15` is an entry of one."""
    group, _, entry = field.partition(".")
    found = []
    for record in records:
        value = (record.get(group) or {}).get(entry) if entry else record.get(group)
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((x(record), float(value)))
    return found


def training_loss(run: RecordedRun, x: Callable[[Record], float]) -> Points:
    """The last output's next-token loss where it was recorded apart: what is added to it for exits and teachers differs
    between recipes, so the sum could be compared with neither validation nor other runs."""
    return points(run.train, "parts.next_token", x) or points(run.train, "loss", x)


def smooth(values: Sequence[float], factor: float) -> list[float]:
    """A running mean that keeps `factor` of itself at each point, corrected so that it begins at the first value."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean = factor * mean + (1 - factor) * value
        weight = factor * weight + (1 - factor)
        out.append(mean / weight)
    return out


def exit_depths(runs: Sequence[RecordedRun]) -> list[str]:
    """The early exits that any of the runs was validated at, shallow to deep."""
    return sorted({depth for run in runs for record in run.validation for depth in record.get("exits") or {}}, key=int)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OptionError(f"there is no run at {path}; a run is a directory with a {FILE}")
    if (path / FILE).is_file():
        return [path / FILE]
    inside = sorted(path.glob(f"*/{FILE}"))
    if not inside:
        raise OptionError(f"{path} holds no {FILE}, and neither do the directories in it; name a run")
    return inside


def _names(files: list[Path]) -> list[str]:
    """The runs' directories, with as much of their paths as tells them apart."""
    parts = [(file.parent if file.name == FILE else file.with_suffix("")).parts for file in files]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def _read(file: Path, name: str) -> RecordedRun:
    try:
        records = read_records(file)
    except OSError as error:
        raise OptionError(f"{file} cannot be read as the records of a run ({error})") from error
    known = [record for record in records if _is_record(record)]
    train, validation = ([r for r in known if r["kind"] == kind] for kind in ("train", "validation"))
    if not train and not validation:
        raise OptionError(f"{file} holds no record of training yet")
    return RecordedRun(name=name, file=file, train=tuple(train), validation=tuple(validation))


def _is_record(record: Record) -> bool:
    """Whether a record has what every record has, and of those of its groups that it has, numbers or nothing."""
    if not all(is_int(record.get(name)) and record[name] >= 0 for name in ("step", "tokens")):
        return False
    groups = [record.get("exits") or {}, record.get("parts") or {}]
    if not all(isinstance(group, dict) for group in groups):
        return False
    numbers = all(value is None or is_number(value) for group in groups for value in group.values())
    return numbers and all(depth.isdecimal() for depth in groups[0])
