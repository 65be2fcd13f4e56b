"""`fathomlm eval MODEL --tasks NAME,NAME`, from local files or through lm-evaluation-harness, and `fathomlm eval ppl`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathomlm import __version__
from fathomlm.checkpoints.resolve import describe, dtype_name, plan_of
from fathomlm.cli.common import read_documents
from fathomlm.cli.decoding import lift_exit_vocab
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.common import write_lines
from fathomlm.lab.evaluate.likelihood import LocalTask, answer, read_task, samples
from fathomlm.lab.evaluate.options import Perplexity, Tasks
from fathomlm.lab.evaluate.outputs import Output, choose_outputs
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder, predict
from fathomlm.lab.evaluate.tasks import GROUPS, NAMES, HarnessTasks, Metrics, check_folder, find_file, gather, members, stem
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomModel

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


def run_tasks(options: Tasks) -> int:
    found = _find(options)
    outputs = outputs_of(options)
    if found.missing:
        print(f"fathomlm: {options.data} has no file for {', '.join(found.missing)}", file=sys.stderr)
    model = options.load(exits=options.exit_options.exits, any_base=options.exit_options.any_base)
    lift_exit_vocab(model)
    begun = time.perf_counter()
    results, lines = _answer(options, found, model, outputs)
    if options.out is not None:
        write_lines(options.out, lines)
    record = about(options, "tasks", model, options.exit_options.exits) | {
        "shots": options.shots,
        "tasks": _origins(found),
        "missing": list(found.missing),
        "outputs": [_record(output, found, metrics) for output, metrics in zip(outputs, results, strict=True)],
        "seconds": time.perf_counter() - begun,
    }
    return options.answer(record, _print_tasks)


def _find(options: Tasks) -> TaskSelection:
    """All checks of the tasks, before a model is loaded."""
    names = tuple(dict.fromkeys(name for name in options.tasks if name))
    if not names:
        raise OptionError("--tasks names no task")
    if options.data is not None:
        check_folder(options.data)
    files: dict[str, Path] = {}
    hub, missing = [], []
    for name in dict.fromkeys(task for typed in names for task in members(typed)):
        if NAMES.search(name):
            given, task = Path(name).expanduser(), stem(Path(name))
            if files.get(task, given) != given:
                raise OptionError(f"--tasks: {files[task]} and {given} are both called '{task}'; rename one of the files")
            files[task] = given
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
    groups = {name: asdict(gather(name, found)) for name in tasks.names if name in GROUPS}
    return {**output.record(), "tasks": found, "groups": groups}


def _print_tasks(record: dict[str, Any]) -> None:
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


def run_perplexity(options: Perplexity) -> int:
    documents = read_documents(options.data, options.column, options.limit, empty=True)
    outputs = outputs_of(options)

    model = options.load(exits=options.exit_options.exits, any_base=options.exit_options.any_base)
    lift_exit_vocab(model)
    if options.context is not None and options.context > model.architecture.context:
        raise OptionError(f"--context must be <= the model's {model.architecture.context:,} tokens, got {options.context}")
    begun = time.perf_counter()
    scorer = Scorer(model, outputs, batch=options.batch_size, max_length=options.context)
    with progress_bar("predicting", unit="windows") as update:
        found = predict(scorer, TextEncoder(model), documents, stride=options.stride, join=options.join, on_done=update)
    record: dict[str, Any] = about(options, "ppl", model, options.exit_options.exits) | {
        "data": list(options.data),
        "context": scorer.max_length,
        "stride": options.stride or scorer.max_length,
        "outputs": [output.record() | each.record() for output, each in zip(outputs, found, strict=True)],
        "seconds": time.perf_counter() - begun,
    }
    return options.answer(record, _print_perplexity)


def _print_perplexity(record: dict[str, Any]) -> None:
    rows = [["output", "tokens", "nats per token", "perplexity", "bits per byte"]]
    rows += [
        [each["output"], f"{each['tokens']:,}"]
        + [number(each[name]) for name in ("nats_per_token", "perplexity", "bits_per_byte")]
        for each in record["outputs"]
    ]
    print_table(rows)


def about(options: Any, kind: str, model: FathomModel, exits: Path | None) -> dict[str, Any]:
    """How every record begins."""
    return {
        "kind": kind,
        "model": options.model,
        "exit_pack": None if exits is None else str(exits),
        "plan": describe(model),
        "dtype": dtype_name(model),
        "device": options.device,
        "version": __version__,
        "batch": options.batch_size,
        "limit": options.limit,
    }


def number(value: float) -> str:
    """Four digits behind the point; a perplexity may be beyond all counting."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3e}"


def outputs_of(options: Tasks | Perplexity) -> tuple[Output, ...]:
    """From the model's configuration, before its weights are loaded."""
    chosen = options.exit_options
    return choose_outputs(plan_of(options.model, chosen.exits), chosen.exit, chosen.max_depth)
