"""`fathomlm eval MODEL --tasks NAME,NAME`: likelihood tasks, from local files or through lm-evaluation-harness."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ModelOptions
from fathomlm.cli.decoding import lift_exit_vocab
from fathomlm.cli.first import check_new_file
from fathomlm.cli.progress import progress_bar
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.cli.eval_common import (
    BatchOptions,
    EvaluatedOutputOptions,
    ShotOptions,
    about,
    answer,
    number,
    write_lines,
)
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option, section

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.harness_tasks import HarnessTasks
    from fathomlm.lab.evaluate.likelihood import LocalTask
    from fathomlm.lab.evaluate.outputs import Output
    from fathomlm.lab.evaluate.tasks import Metrics
    from fathomlm.model.hub import FathomForCausalLM

SHOWN = ("acc", "acc_norm", "perplexity")
"""The first columns of a table, in order; what else a task has follows."""


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """The tasks that were named, found and read."""

    names: tuple[str, ...]
    """Tasks and groups, as they were typed."""
    local: tuple[LocalTask, ...]
    hub: HarnessTasks | None
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tasks(BatchOptions, ModelOptions):
    """Score how likely MODEL finds the answers of tasks such as lambada_openai, hellaswag or arc_easy. A task is read from a
    file (a .jsonl path, or its name with --data DIR), else by lm-evaluation-harness from the Hugging Face hub, which has
    thousands. Groups: thesis-rrt (LAMBADA, HellaSwag, PIQA, WinoGrande, ARC-e, ARC-c, OpenBookQA) and thesis-mor (LAMBADA,
    HellaSwag, PIQA, WinoGrande, ARC as one number, MMLU as continuation)."""

    tasks: tuple[str, ...] = option(comma=True, metavar="NAME,...", help="task and group names, or .jsonl files; repeatable")
    data: Path | None = option(None, metavar="DIR", help="read tasks from NAME.jsonl or NAME_test.jsonl.gz in DIR")
    shots: int | None = like(ShotOptions, "shots", default_text="the task's standard, none for those above")
    include: Path | None = option(None, metavar="DIR", help="directory of lm-evaluation-harness tasks (YAML) of your own")
    out: Path | None = option(
        None, metavar="FILE", first=check_new_file,
        help="write every example of local tasks with its scores, as JSON Lines",
    )  # fmt: skip
    batch_size: int = like(BatchOptions, "batch_size", 16)
    exit_options: EvaluatedOutputOptions = section(EvaluatedOutputOptions, "outputs")

    def run(self) -> int:
        found = _find(self)
        outputs = self.exit_options.outputs(self.model)
        if found.missing:
            print(f"fathomlm: {self.data} has no file for {', '.join(found.missing)}", file=sys.stderr)
        model = self.load(exits=self.exit_options.exits, any_base=self.exit_options.any_base)
        lift_exit_vocab(model)
        begun = time.perf_counter()
        results, lines = _answer(self, found, model, outputs)
        if self.out is not None:
            write_lines(self.out, lines)
        record = about(self, "tasks", model, self.exit_options.exits) | {
            "shots": self.shots,
            "tasks": _origins(found),
            "missing": list(found.missing),
            "outputs": [_record(output, found, metrics) for output, metrics in zip(outputs, results, strict=True)],
            "seconds": time.perf_counter() - begun,
        }
        answer(self, record, _print)
        return 0


def _find(options: Tasks) -> TaskSelection:
    """All checks of the tasks, before a model is loaded."""
    from fathomlm.lab.evaluate.harness_tasks import HarnessTasks
    from fathomlm.lab.evaluate.likelihood import read_task
    from fathomlm.lab.evaluate.tasks import NAMES, check_folder, find_file, members, stem

    names = tuple(dict.fromkeys(name for name in options.tasks if name))
    if not names:
        raise OptionError("--tasks names no task")
    if options.data is not None:
        check_folder(options.data)
    files: dict[str, Path] = {}
    hub, missing = [], []
    for name in dict.fromkeys(task for typed in names for task in members(typed)):
        if NAMES.search(name):
            files[stem(Path(name))] = Path(name).expanduser()
        elif options.data is None:
            hub.append(name)
        elif (path := find_file(options.data, name)) is not None:
            files[name] = path
        else:
            missing.append(name)
    if missing and not files and not hub:
        raise DataError(f"{options.data} has no file for {', '.join(missing)}; --tasks without --data asks the hub")
    local = tuple(read_task(path, name=name, shots=options.shots or 0, limit=options.limit) for name, path in files.items())
    return TaskSelection(names, local, HarnessTasks(hub, options.include) if hub else None, tuple(missing))


def _answer(
    options: Tasks, tasks: TaskSelection, model: FathomForCausalLM, outputs: Sequence[Output]
) -> tuple[list[dict[str, Metrics]], list[dict[str, Any]]]:
    """For each output the metrics of all tasks, and the lines of --out."""
    from fathomlm.lab.evaluate.encoding import TextEncoder
    from fathomlm.lab.evaluate.likelihood import answer, samples
    from fathomlm.lab.evaluate.scoring import Scorer

    results: list[dict[str, Metrics]] = [{} for _ in outputs]
    lines: list[dict[str, Any]] = []
    scorer, encoder = Scorer(model, outputs, batch=options.batch_size), TextEncoder(model)
    for task in tasks.local:
        with progress_bar(task.name, unit="requests") as update:
            answered = answer(task, scorer, encoder, on_done=update)
        for output, found, each in zip(outputs, results, answered, strict=True):
            found[task.name] = each.metrics
            if options.out is not None:
                lines += [output.record() | sample for sample in samples(task, each)]
    if tasks.hub is not None:
        with progress_bar(", ".join(tasks.hub.names), unit="requests") as update:
            found_there = tasks.hub.run(
                model, outputs, batch=options.batch_size, shots=options.shots, limit=options.limit, on_done=update
            )
        for found, more in zip(results, found_there, strict=True):
            found |= more
    return results, lines


def _origins(tasks: TaskSelection) -> dict[str, dict[str, Any]]:
    files = {task.name: {"from": "file", "file": str(task.path), "examples": len(task.items)} for task in tasks.local}
    return files | {name: {"from": "lm-eval", "file": None} for name in (tasks.hub.names if tasks.hub is not None else ())}


def _record(output: Output, tasks: TaskSelection, found: dict[str, Metrics]) -> dict[str, Any]:
    from dataclasses import asdict

    from fathomlm.lab.evaluate.tasks import GROUPS, gather

    groups = {name: asdict(gather(name, found)) for name in tasks.names if name in GROUPS}
    return {**output.record(), "tasks": found, "groups": groups}


def _print(record: dict[str, Any]) -> None:
    outputs = record["outputs"]
    tasks = list(outputs[0]["tasks"])
    if len(outputs) == 1:
        print_table(_table("task", {task: outputs[0]["tasks"][task] for task in tasks}))
    else:
        for task in tasks:
            print_table(_table("output", {output["output"]: output["tasks"][task] for output in outputs}), title=task)
    for group in outputs[0]["groups"]:
        found = {output["output"]: output["groups"][group] for output in outputs}
        columns = list(outputs[0]["groups"][group]["columns"])
        body = [
            [name, *(_percent(value) for value in (*each["columns"].values(), each["average"]))]
            for name, each in found.items()
        ]
        print_table([["output", *columns, "average"], *body], title=f"{group}: accuracy in percent")
        if lacking := outputs[0]["groups"][group]["missing"]:
            print(f"{group} has no average without {', '.join(lacking)}")


def _table(what: str, rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Metrics by name of a task or an output, the usual columns first."""
    every = [name for metrics in rows.values() for name in metrics if name != "examples" and not name.endswith("_stderr")]
    columns = [name for name in dict.fromkeys([*SHOWN, *every]) if name in every]
    body = [
        [name, f"{metrics['examples']:,}", *(_shown(metrics, column) for column in columns)]
        for name, metrics in rows.items()
    ]
    return [[what, "examples", *columns], *body]


def _shown(metrics: dict[str, Any], name: str) -> str:
    if name not in metrics:
        return ""
    error = metrics.get(f"{name}_stderr")
    return number(metrics[name]) + ("" if error is None else f" ± {error:.4f}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
