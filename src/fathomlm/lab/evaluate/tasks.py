"""The tasks that have a name, the thesis' groups of them, and where a folder has their files; and rows of JSON lines, plain
or compressed, each with the place that a message about it names.

A name is lm-evaluation-harness' own, so that it means the same from the hub and from a folder. Its standard shots are none
for all of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fathomlm.errors import DataError, choices
from fathomlm.jsonfile import Fields, parse_object
from fathomlm.train.data.sources import MOST, missing, open_lines

NAMES = re.compile(r"\.jsonl(\.(gz|xz|zst))?$", re.IGNORECASE)


def read_rows(path: Path, limit: int | None = None) -> list[Fields]:
    """The first `limit` rows of a file, or all; a file without any is an error."""
    rows = list(islice(_rows(path), limit))
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _rows(path: Path) -> Iterator[Fields]:
    if not path.is_file():
        raise DataError(missing(path, "file"))
    if NAMES.search(path.name) is None:
        raise DataError(f"{path}: rows are read from .jsonl files (also .gz, .xz, .zst)")
    for number, (line, _) in enumerate(open_lines(path), start=1):
        where = f"{path} line {number}"
        if line is None:
            raise DataError(f"{where} has more than {MOST:,} bytes, the most that a row may have")
        if line.strip():
            yield parse_object(line, where, error=DataError, nonfinite=True)


def one_or_more(row: Fields, name: str) -> tuple[str, ...]:
    """A field that holds one text, or a list of at least one."""
    found = row.texts(name) if isinstance(row.raw(name), list) else [row.text(name)]
    if not found:
        raise row.wrong(name, "a string or a list of strings")
    return tuple(found)


Metrics = dict[str, float | int]
"""By name: `examples`, then `acc`, `acc_norm` or `perplexity`, and `..._stderr` beside an accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTask:
    """One task that is known by name."""

    split: str
    """The part that is evaluated, where a folder has several."""
    files: tuple[str, ...] = ()
    """Other names that its file may have."""
    bare: bool = False
    """Whether its questions stand without the words Question and Answer."""


TASKS: dict[str, KnownTask] = {
    "lambada_openai": KnownTask(split="test", files=("lambada",)),
    "hellaswag": KnownTask(split="validation"),
    "piqa": KnownTask(split="validation"),
    "winogrande": KnownTask(split="validation"),
    "arc_easy": KnownTask(split="test"),
    "arc_challenge": KnownTask(split="test"),
    "openbookqa": KnownTask(split="test", bare=True),
    "mmlu_continuation": KnownTask(split="test", files=("mmlu",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupColumn:
    """One number of a group: a metric, as a mean over some tasks."""

    tasks: tuple[str, ...]
    metric: str = "acc_norm"


_COMMON = {
    "LAMBADA": GroupColumn(tasks=("lambada_openai",), metric="acc"),
    "HellaSwag": GroupColumn(tasks=("hellaswag",)),
    "PIQA": GroupColumn(tasks=("piqa",)),
    "WinoGrande": GroupColumn(tasks=("winogrande",), metric="acc"),
}
GROUPS: dict[str, dict[str, GroupColumn]] = {
    "thesis-rrt": _COMMON
    | {
        "ARC-e": GroupColumn(tasks=("arc_easy",)),
        "ARC-c": GroupColumn(tasks=("arc_challenge",)),
        "OpenBookQA": GroupColumn(tasks=("openbookqa",)),
    },
    "thesis-mor": _COMMON
    | {
        "ARC": GroupColumn(tasks=("arc_easy", "arc_challenge")),
        "MMLU": GroupColumn(tasks=("mmlu_continuation",), metric="acc"),
    },
}
"""The thesis' few-shot columns (3.4 and 4.8.4): accuracy normalised by byte length, but not for LAMBADA, WinoGrande and
MMLU; ARC as one number and MMLU as continuation in chapter 4."""

_SPLITS = {"test": ("test",), "validation": ("validation", "valid", "val", "dev"), "train": ("train",)}
_ENDING = re.compile(rf"[_.-](?P<split>{'|'.join(name for names in _SPLITS.values() for name in names)})$", re.IGNORECASE)


def members(name: str) -> tuple[str, ...]:
    """The tasks of a group, in order; of a task, itself."""
    if name not in GROUPS:
        return (name,)
    return tuple(task for column in GROUPS[name].values() for task in column.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    columns: dict[str, float | None]
    """None where a task is missing."""
    average: float | None
    """None unless all columns are there: a mean over other tasks is another number."""
    missing: tuple[str, ...]
    """Tasks that were not evaluated."""


def gather(group: str, results: Mapping[str, Metrics]) -> GroupResult:
    """A group's row, from the metrics of its tasks."""
    columns: dict[str, float | None] = {}
    for label, column in GROUPS[group].items():
        found = [float(results[task][column.metric]) for task in column.tasks if task in results]
        columns[label] = sum(found) / len(found) if len(found) == len(column.tasks) else None
    missing = tuple(task for column in GROUPS[group].values() for task in column.tasks if task not in results)
    whole = [value for value in columns.values() if value is not None]
    return GroupResult(columns=columns, average=None if missing else sum(whole) / len(whole), missing=missing)


def accuracy_error(part: float, many: int) -> float:
    return math.sqrt(part * (1 - part) / (many - 1)) if many > 1 else 0.0


def check_folder(folder: Path) -> None:
    if folder.is_file():
        raise DataError(f"{folder} is a file; --data takes a folder, and a file itself goes to --tasks")
    if not folder.is_dir():
        raise DataError(f"the folder {folder} does not exist")


def find_file(folder: Path, name: str) -> Path | None:
    """A task's file in a folder: NAME.jsonl, or NAME_test.jsonl and the like; None where a known task has none."""
    task = TASKS.get(name)
    ranked = _ranked(folder, name, *(() if task is None else task.files), split="test" if task is None else task.split)
    if not ranked and task is None:
        found = [stem(file) for file in _files(folder)]
        raise DataError(f"{choices('task', name, {*TASKS, *GROUPS, *found})} (in {folder})")
    return ranked[0] if ranked else None


def named(path: Path) -> KnownTask | None:
    """The task that a file's name says it is."""
    base = _base(stem(path))
    return next((task for name, task in TASKS.items() if base == name or base in task.files), None)


def shots_file(path: Path) -> Path | None:
    """The part of the same task that worked examples are taken from: its train file, or its dev file."""
    base = _base(stem(path))
    parts = {_split(file): file for file in _files(path.parent) if _base(stem(file)) == base and file != path}
    return parts.get("train") or (parts.get("validation") if _split(path) == "test" else None)


def stem(path: Path) -> str:
    """A file's name without .jsonl and what it is compressed with."""
    return NAMES.sub("", path.name)


def _ranked(folder: Path, *names: str, split: str) -> list[Path]:
    """Files of the task, the best first: the name itself, the standard part, another part; never what is trained on."""
    order = ["", split, *(part for part in _SPLITS if part not in (split, "train"))]
    found = []
    for file in _files(folder):
        for rank, name in enumerate(names):
            part = "" if stem(file) == name else _split(file)
            if name in (stem(file), _base(stem(file))) and part in order:
                found.append((order.index(part), rank, file))
    return [file for _, _, file in sorted(found)]


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if NAMES.search(file.name) and file.is_file())


def _base(name: str) -> str:
    return _ENDING.sub("", name)


def _split(file: Path) -> str:
    """Which part of a task a file is: test, validation or train; empty where its name says none."""
    found = _ENDING.search(stem(file))
    if found is None:
        return ""
    return next(part for part, names in _SPLITS.items() if found["split"].lower() in names)
