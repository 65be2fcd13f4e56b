"""`fathomlm eval MODEL --tasks NAME,NAME`: likelihood tasks, from local files or through lm-evaluation-harness."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.exit_options import lift_exit_vocab, pack_options
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import add_model_arguments, load_model
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.cli.eval_options import (
    about,
    add_output_arguments,
    add_run_arguments,
    check_least,
    check_out,
    number,
    print_record,
    read_outputs,
    write_lines,
)
from fathomlm.lab.tables import print_table

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.harness_tasks import HarnessTasks
    from fathomlm.lab.evaluate.likelihood import LocalTask
    from fathomlm.lab.evaluate.outputs import Output
    from fathomlm.lab.evaluate.tasks import Metrics
    from fathomlm.model.hub import FathomForCausalLM

HELP = "multiple choice and last words: accuracy, normalised accuracy, perplexity (the kind without a name)"
DESCRIPTION = (
    "Scores how likely MODEL finds the answers of tasks such as lambada_openai, hellaswag or arc_easy. A task is read from "
    "a file (a .jsonl path, or its name with --data DIR), else by lm-evaluation-harness from the Hugging Face hub, which "
    "knows thousands. Groups: thesis-rrt (LAMBADA, HellaSwag, PIQA, WinoGrande, ARC-e, ARC-c, OpenBookQA) and thesis-mor "
    "(LAMBADA, HellaSwag, PIQA, WinoGrande, ARC as one number, MMLU as continuation)."
)
SHOWN = ("acc", "acc_norm", "perplexity")
"""The first columns of a table, in order; what else a task has follows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    names = "task and group names, or .jsonl files; a comma list, or given again"
    add("--tasks", metavar="NAME,...", action="append", required=True, help=names)
    add("--data", metavar="DIR", type=Path, help="read tasks from a folder's files, NAME.jsonl or NAME_test.jsonl.gz")
    shots = "worked examples in front of each question (default: the task's standard, none for all named here)"
    add("--shots", metavar="N", type=int, help=shots)
    add("--include", metavar="DIR", type=Path, help="a folder with lm-evaluation-harness tasks (YAML) of your own")
    add("--out", metavar="FILE", type=Path, help="write every example of local tasks with its scores, as JSON lines")
    add_output_arguments(parser)
    add_run_arguments(parser, batch=16, rows="examples")


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """What the options name, found and read."""

    names: tuple[str, ...]
    """Tasks and groups, as they were typed."""
    local: tuple[LocalTask, ...]
    hub: HarnessTasks | None
    missing: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    check_least(args, "limit", "batch")
    if args.shots is not None and args.shots < 0:
        raise OptionError(f"--shots must be >= 0, got {args.shots}")
    check_out(args.out)
    asked = _find(args)
    outputs, pack = read_outputs(args), pack_options(args)
    if asked.missing:
        print(f"fathomlm: {args.data} has no file for {', '.join(asked.missing)}", file=sys.stderr)
    model = load_model(args, **pack)
    lift_exit_vocab(model)
    begun = time.perf_counter()
    results, lines = _answer(args, asked, model, outputs)
    if args.out is not None:
        write_lines(args.out, lines)
    record = about(args, model) | {
        "shots": args.shots,
        "tasks": _origins(asked),
        "missing": list(asked.missing),
        "outputs": [_record(output, asked, found) for output, found in zip(outputs, results, strict=True)],
        "seconds": time.perf_counter() - begun,
    }
    if args.json:
        print_record(record)
    else:
        _print(record)
    return 0


def _find(args: argparse.Namespace) -> TaskSelection:
    """Everything that can be wrong with the tasks, said before a model is loaded."""
    from fathomlm.lab.evaluate.harness_tasks import HarnessTasks
    from fathomlm.lab.evaluate.likelihood import read_task
    from fathomlm.lab.evaluate.records import NAMES
    from fathomlm.lab.evaluate.tasks import check_folder, find_file, members, stem

    names = tuple(dict.fromkeys(word.strip() for text in args.tasks for word in text.split(",") if word.strip()))
    if not names:
        raise OptionError("--tasks names no task")
    if args.data is not None:
        check_folder(args.data)
    files: dict[str, Path] = {}
    hub, missing = [], []
    for name in dict.fromkeys(task for typed in names for task in members(typed)):
        if NAMES.search(name):
            files[stem(Path(name))] = Path(name).expanduser()
        elif args.data is None:
            hub.append(name)
        elif (path := find_file(args.data, name)) is not None:
            files[name] = path
        else:
            missing.append(name)
    if missing and not files and not hub:
        raise DataError(f"{args.data} has no file for {', '.join(missing)}; --tasks without --data asks the hub")
    local = tuple(read_task(path, name=name, shots=args.shots or 0, limit=args.limit) for name, path in files.items())
    return TaskSelection(names, local, HarnessTasks(hub, args.include) if hub else None, tuple(missing))


def _answer(
    args: argparse.Namespace, asked: TaskSelection, model: FathomForCausalLM, outputs: Sequence[Output]
) -> tuple[list[dict[str, Metrics]], list[dict[str, Any]]]:
    """For each output the metrics of all tasks, and the lines of --out."""
    from fathomlm.lab.evaluate.encoding import TextEncoder
    from fathomlm.lab.evaluate.likelihood import answer, samples
    from fathomlm.lab.evaluate.scoring import Scorer

    results: list[dict[str, Metrics]] = [{} for _ in outputs]
    lines: list[dict[str, Any]] = []
    scorer, encoder = Scorer(model, outputs, batch=args.batch), TextEncoder(model)
    for task in asked.local:
        with layer_bar(task.name, unit="requests") as tick:
            answered = answer(task, scorer, encoder, on_done=tick)
        for output, found, each in zip(outputs, results, answered, strict=True):
            found[task.name] = each.metrics
            if args.out is not None:
                lines += [output.record() | sample for sample in samples(task, each)]
    if asked.hub is not None:
        with layer_bar(", ".join(asked.hub.names), unit="requests") as tick:
            found_there = asked.hub.run(model, outputs, batch=args.batch, shots=args.shots, limit=args.limit, on_done=tick)
        for found, more in zip(results, found_there, strict=True):
            found |= more
    return results, lines


def _origins(asked: TaskSelection) -> dict[str, dict[str, Any]]:
    files = {task.name: {"from": "file", "file": str(task.path), "examples": len(task.items)} for task in asked.local}
    return files | {name: {"from": "lm-eval", "file": None} for name in (asked.hub.names if asked.hub is not None else ())}


def _record(output: Output, asked: TaskSelection, found: dict[str, Metrics]) -> dict[str, Any]:
    from dataclasses import asdict

    from fathomlm.lab.evaluate.tasks import GROUPS, gather

    groups = {name: asdict(gather(name, found)) for name in asked.names if name in GROUPS}
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
