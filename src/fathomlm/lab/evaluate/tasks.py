"""The tasks that have a name, the thesis' groups of them, and where a folder has their files; and rows of JSON lines, plain
or compressed, each with the place that a message about it names.

A name is lm-evaluation-harness' own, so that it means the same from the hub and from a folder. Its standard shots are none
for all of these. `HarnessTasks` runs those from the hub.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.errors import DataError, OptionError, choices
from fathomlm.fields import Fields
from fathomlm.jsonfile import parse_object
from fathomlm.lab.common import OnProgress
from fathomlm.train.data.sources import MOST, missing, open_lines
from fathomlm.train.data.tokenizers import one_line, quiet_hub

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.outputs import Output
    from fathomlm.model.hub import FathomForCausalLM

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


EXTRA = "pip install 'fathomlm[eval]'"


class HarnessTasks:
    """Names that lm-eval knows. Made before a model is loaded, so that a slip costs no waiting."""

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        """`include` is a folder with task descriptions (YAML) of the user's own."""
        self.names = tuple(names)
        if include is not None and not include.is_dir():
            raise DataError(f"the folder {include} does not exist")
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise OptionError(_without(self.names)) from error
        with _quiet():
            self._manager: Any = TaskManager(include_path=None if include is None else str(include))
        known = self._manager.all_tasks
        for name in self.names:
            if name not in known:
                raise OptionError(choices("task", name, {*known, *GROUPS}))

    def run(
        self,
        model: FathomForCausalLM,
        outputs: Sequence[Output],
        *,
        batch: int,
        shots: int | None = None,
        limit: int | None = None,
        on_done: OnProgress | None = None,
    ) -> list[dict[str, Metrics]]:
        """For each output, the metrics of each task by name."""
        import lm_eval

        from fathomlm.lab.evaluate.harness import HarnessModel

        harness = HarnessModel(model, batch_size=batch, outputs=outputs, on_done=on_done)
        found = []
        for number in range(len(outputs)):
            harness.at = number
            try:
                with _quiet():
                    results = lm_eval.simple_evaluate(
                        model=harness,
                        tasks=list(self.names),
                        num_fewshot=shots,
                        limit=limit,
                        bootstrap_iters=0,
                        log_samples=False,
                        task_manager=self._manager,
                    )
            except Exception as error:
                if harness.inputs or isinstance(error, OptionError):
                    raise
                # Datasets, the hub and task scripts raise what they like.
                inputs = ", ".join(self.names)
                raise DataError(f"{inputs} could not be loaded: {one_line(error)}; --data DIR reads from files") from error
            found.append({name: _metrics(results, name) for name in self.names})
        return found


def _without(names: Sequence[str]) -> str:
    """The message where lm-eval is not installed; a name that only looks like one of ours is a slip first."""
    known = {*TASKS, *GROUPS}
    slip = next((name for name in names if name not in known), None)
    hint = "" if slip is None else f"{choices('task', slip, known)}. "
    return f"{hint}Tasks from the hub need lm-eval ({EXTRA}); --data DIR reads them from files without it"


def _metrics(results: dict[str, Any], name: str) -> Metrics:
    """A task's numbers without lm-eval's filter names; of a group, those that it has of its own."""
    counts = results.get("n-samples", {})
    mine = [name] if name in counts else [task for task in counts if task in _below(results, name)]
    many = sum(int(counts[task]["effective"]) for task in mine)
    found: Metrics = {"examples": many}
    for key, value in results["results"][name].items():
        metric, _, kept = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and kept and not metric.endswith("_stderr"):
            metric = metric if kept == "none" else f"{metric} ({kept})"
            found[metric] = float(value)
            if metric in ("acc", "acc_norm"):
                found[f"{metric}_stderr"] = accuracy_error(float(value), many)
    return found


def _below(results: dict[str, Any], name: str) -> set[str]:
    """The tasks under a group, at any depth."""
    under = results.get("group_subtasks", {}).get(name, ())
    return {task for child in under for task in ({child} | _below(results, child))}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval logs and prints at length, and standard output is ours; failures are reported once, by the error."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_hub(), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(before)
