"""Likelihood tasks by our adapter and by lm-evaluation-harness' own Hugging Face model (`HFLM`), example by example.

    python benchmarks/lm_eval_parity.py run --data DIR [--tasks lambada hellaswag] [--limit 200] [--out FILE]

DIR holds the tasks' files as `fathomlm eval --data DIR` reads them (docs/evaluate.md, "Local files"). Both sides get the
same GGUF file of SmolLM2-135M-Instruct and share nothing behind it: HFLM's model and tokenizer come from transformers' own
GGUF reader, ours from `fathomlm.load`. Both answer the harness' requests for the same rows in float32. A third column is
`fathomlm eval --data` itself, which reads the rows, writes the prompts and counts without the harness.

Compared for every example: the log-likelihood of each continuation (within TOLERANCE nats), whether a greedy choice would
give it, and whether the example counts as right. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import fathomlm
from fathomlm.checkpoints.fetch import fetch
from fathomlm.errors import FathomError
from fathomlm.lab.common import environment
from fathomlm.lab.evaluate.harness import HarnessModel
from fathomlm.lab.evaluate.likelihood import answer, count, read_task
from fathomlm.lab.evaluate.tasks import check_folder, find_file

MODEL = "smollm2-135m"
TOLERANCE = 1e-3
"""Nats by which two sums over a continuation's tokens may differ: float32, in another order of additions."""
NAMES = {"lambada": "lambada_openai", "hellaswag": "hellaswag"}
"""Tasks by the word that --tasks takes, and their names in the harness and in a folder."""
ACCURACY = {"aggregation": "mean", "higher_is_better": True}
FORMS: dict[str, dict[str, Any]] = {
    "lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + target}}",
        "metric_list": [{"metric": "perplexity"}, ACCURACY | {"metric": "acc"}],
    },
    "hellaswag": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [ACCURACY | {"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    },
}
"""The harness' tasks of these names, over the fields of local files. Its acc_norm divides by characters, acc_bytes by bytes;
`fathomlm eval --data` calls the latter acc_norm (docs/evaluate.md)."""
SIDES = ("hflm", "adapter", "files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What one side made of one row."""

    asked: tuple[tuple[str, str], ...]
    """Contexts and continuations."""
    scores: tuple[tuple[float, bool], ...]
    """The log-likelihood of each, and whether it is the greedy choice."""
    right: Mapping[str, bool]
    """By metric."""


def compare(ours: Any, theirs: Any, folder: Path, names: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Each task's comparison by name. `theirs` is a model of the harness, `ours` one that `fathomlm.load` gives."""
    check_folder(folder)
    files = {name: find_file(folder, NAMES[name]) for name in names}
    if lacking := [name for name, file in files.items() if file is None]:
        raise FathomError(f"{folder} has no file for {', '.join(lacking)}")
    adapter = HarnessModel(ours, batch_size=16)
    with tempfile.TemporaryDirectory() as place:
        manager = _write_tasks(Path(place), files)
        by_theirs = _by_harness(theirs, manager, names, limit)
        by_adapter = _by_harness(adapter, manager, names, limit)
    found = {}
    for name, file in files.items():
        sides = dict(zip(SIDES, (by_theirs[name], by_adapter[name], _by_files(adapter, file, name, limit)), strict=True))
        about = {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        found[name] = about | _differences(sides)
    return found


def _write_tasks(place: Path, files: Mapping[str, Path]) -> TaskManager:
    """Tasks of the harness over the local files, and nothing else that it would list."""
    for name, file in files.items():
        data = {"cache_dir": str(place / "cache"), "data_files": {"test": str(file.absolute())}}
        task = {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": data} | FORMS[name]
        (place / f"{name}.yaml").write_text(yaml.safe_dump(task | {"metadata": {"version": 1}}), encoding="utf-8")
    return TaskManager(include_path=str(place), include_defaults=False)


def _by_harness(model: Any, manager: TaskManager, names: Sequence[str], limit: int | None) -> dict[str, list[Example]]:
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(names), limit=limit, bootstrap_iters=0, log_samples=True, task_manager=manager
    )
    return {name: [_example(name, row) for row in _in_order(results["samples"][name])] for name in names}


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["doc_id"])


def _example(name: str, row: dict[str, Any]) -> Example:
    asked = tuple((context, continuation) for context, continuation in row["arguments"])
    metrics = [each["metric"] for each in FORMS[name]["metric_list"] if each["metric"] != "perplexity"]
    return Example(
        asked=asked,
        scores=tuple((float(likely), bool(greedy)) for likely, greedy in row["filtered_resps"]),
        right={metric: bool(row[metric]) for metric in metrics},
    )


def _by_files(adapter: HarnessModel, file: Path, name: str, limit: int | None) -> list[Example]:
    """What `fathomlm eval --data` does: its own reader, prompts and counting, row by row."""
    task = read_task(file, name=name, limit=limit)
    (answered,) = answer(task, adapter.scorer, adapter.encoder)
    examples = []
    for item, text, scores in zip(task.items, task.examples, answered.scores, strict=True):
        found = count(task.form, [item], [scores])
        right = {theirs: bool(found[mine]) for mine, theirs in (("acc", "acc"), ("acc_norm", "acc_bytes")) if mine in found}
        examples.append(Example(asked=item.behind(text), scores=tuple(map(tuple, scores)), right=right))
    return examples


def _differences(sides: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """All sides against the first: how far log-likelihoods are apart, and which examples count otherwise."""
    base = sides["hflm"]
    found: dict[str, Any] = {"examples": len(base), "requests": sum(len(each.scores) for each in base)}
    found |= {
        side: {metric: sum(each.right[metric] for each in examples) / len(examples) for metric in examples[0].right}
        for side, examples in sides.items()
    }
    found["against_hflm"] = {side: _against(base, examples) for side, examples in sides.items() if side != "hflm"}
    found["equal"] = all(each["equal"] for each in found["against_hflm"].values())
    return found


def _against(base: Sequence[Example], other: Sequence[Example]) -> dict[str, Any]:
    pairs = list(enumerate(zip(base, other, strict=True)))
    gaps = [
        abs(mine - theirs) for _, (one, two) in pairs for (theirs, _), (mine, _) in zip(one.scores, two.scores, strict=True)
    ]
    differing = {
        "asked": [i for i, (one, two) in pairs if one.asked != two.asked],
        "greedy": [i for i, (one, two) in pairs if [s[1] for s in one.scores] != [s[1] for s in two.scores]],
    }
    differing |= {
        metric: [i for i, (one, two) in pairs if one.right[metric] != two.right[metric]] for metric in other[0].right
    }
    return {
        "largest_gap": max(gaps),
        "mean_gap": sum(gaps) / len(gaps),
        "examples_that_differ": differing,
        "equal": max(gaps) <= TOLERANCE and not any(differing.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_subparsers(dest="what", required=True).add_parser("run", help="score by both and compare")
    run.add_argument("--data", type=Path, required=True, help="the folder with the tasks' files")
    run.add_argument("--tasks", nargs="+", choices=NAMES, default=list(NAMES))
    run.add_argument("--limit", type=int, help="the first N examples of each (default: all)")
    run.add_argument("--batch", type=int, default=16, help="rows that HFLM runs together; ours are 16")
    run.add_argument("--out", type=Path)
    args = parser.parse_args()

    begun = time.perf_counter()
    file = fetch(MODEL)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch)
    tasks = compare(fathomlm.load(file, dtype="float32"), theirs, args.data, args.tasks, args.limit)
    record = {
        "benchmark": "lm_eval_parity",
        "environment": environment() | {"lm_eval": importlib.metadata.version("lm-eval")},
        "model": MODEL,
        "weights": {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
        "hflm_reads": "transformers' own GGUF reader, model and tokenizer",
        "dtype": "float32",
        "limit": args.limit,
        "tolerance": TOLERANCE,
        "tasks": tasks,
        "equal": all(task["equal"] for task in tasks.values()),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    _print(tasks)
    print(json.dumps(record))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if record["equal"] else 1


def _print(tasks: Mapping[str, Any]) -> None:
    table = Table(title=f"{MODEL}: log-likelihoods and decisions against HFLM's")
    for column in ("task", "side", "examples", "largest gap, nats", "examples that differ", "acc", "acc_bytes"):
        table.add_column(column)
    for name, task in tasks.items():
        for side in SIDES:
            against = task["against_hflm"].get(side)
            gap = "-" if against is None else f"{against['largest_gap']:.2e}"
            many = (
                "-" if against is None else str(len({i for each in against["examples_that_differ"].values() for i in each}))
            )
            accuracies = [f"{task[side][m]:.4f}" if m in task[side] else "-" for m in ("acc", "acc_bytes")]
            table.add_row(name, side, f"{task['examples']:,}", gap, many, *accuracies)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
