"""Likelihood tasks from files: read, score, count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.encoding import TextEncoder
from fathomlm.lab.evaluate.records import read_rows
from fathomlm.lab.evaluate.schemas import Item, Schema, build_items, recognise
from fathomlm.lab.evaluate.scoring import Score, Scorer, Tick
from fathomlm.lab.evaluate.shots import worked_examples
from fathomlm.lab.evaluate.tasks import named, shots_file

Metrics = dict[str, float | int]
"""By name: `examples`, then `acc`, `acc_norm` or `perplexity`, and `..._stderr` beside an accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTask:
    """A file that was read, and what stands in front of each of its questions."""

    name: str
    path: Path
    schema: Schema
    items: tuple[Item, ...]
    examples: tuple[str, ...]
    shots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one output made of a task."""

    scores: tuple[tuple[Score, ...], ...]
    """Of each item's choices."""
    metrics: Metrics


def read_task(path: Path, *, name: str, shots: int = 0, limit: int | None = None) -> LocalTask:
    """A task's rows, checked. `limit` takes the first rows; worked examples may come from any."""
    if shots < 0:
        raise OptionError(f"--shots must be >= 0, got {shots}")
    if limit is not None and limit < 1:
        raise OptionError(f"--limit must be >= 1, got {limit}")
    task = named(path)
    bare = task is not None and task.bare
    source = shots_file(path) if shots else None
    rows = read_rows(path, limit if source is not None or not shots else None)
    schema = recognise(rows[0])
    items = build_items(rows, schema, bare=bare)
    pool = None if source is None else build_items(read_rows(source), schema, bare=bare)
    examples = worked_examples(items, pool, shots)
    return LocalTask(
        name=name,
        path=path,
        schema=schema,
        items=tuple(items[:limit]),
        examples=tuple(examples[:limit]),
        shots=shots,
    )


def answer(task: LocalTask, scorer: Scorer, encoder: TextEncoder, on_done: Tick | None = None) -> list[Answered]:
    """The task at each of the scorer's outputs."""
    asked = [item.behind(text) for item, text in zip(task.items, task.examples, strict=True)]
    try:
        pairs = encoder.pairs([pair for item in asked for pair in item])
        found = scorer.score(pairs, on_done)
    except DataError as error:
        raise DataError(f"{task.path}: {error}") from error
    sizes = [len(item) for item in asked]
    grouped = [_group(scores, sizes) for scores in found]
    return [Answered(scores=scores, metrics=count(task.schema, task.items, scores)) for scores in grouped]


def count(schema: Schema, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> Metrics:
    """The metrics of a task. Among equals the first choice counts as chosen, as in lm-evaluation-harness."""
    if schema.word:
        right = [score.greedy for (score,) in scores]
        mean = sum(score.log_likelihood for (score,) in scores) / len(scores)
        return {"examples": len(items), **accuracy("acc", right), "perplexity": perplexity_of(mean)}
    plain = [_best([score.log_likelihood for score in each]) for each in scores]
    found: Metrics = {"examples": len(items)}
    found |= accuracy("acc", [best == item.gold for best, item in zip(plain, items, strict=True)])
    if not schema.same:
        normal = [
            _best([score.log_likelihood / length for score, length in zip(each, item.lengths, strict=True)])
            for each, item in zip(scores, items, strict=True)
        ]
        found |= accuracy("acc_norm", [best == item.gold for best, item in zip(normal, items, strict=True)])
    return found


def accuracy(name: str, right: Sequence[bool]) -> Metrics:
    """A part of the examples, and the standard error of its mean."""
    part = sum(right) / len(right)
    return {name: part, f"{name}_stderr": accuracy_error(part, len(right))}


def accuracy_error(part: float, many: int) -> float:
    return math.sqrt(part * (1 - part) / (many - 1)) if many > 1 else 0.0


def perplexity_of(mean: float) -> float:
    """exp of the negative mean log-likelihood; infinite where that is beyond a float."""
    return math.exp(-mean) if -mean < 700 else math.inf


def samples(task: LocalTask, answered: Answered) -> list[dict[str, Any]]:
    """Each example with its scores, for a file."""
    rows = zip(task.items, task.examples, answered.scores, strict=True)
    return [
        {
            "task": task.name,
            "example": number,
            "gold": item.gold,
            "choices": [
                {"context": context, "continuation": continuation, **score._asdict()}
                for (context, continuation), score in zip(item.behind(text), scores, strict=True)
            ],
        }
        for number, (item, text, scores) in enumerate(rows)
    ]


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _group(scores: Sequence[Score], sizes: Sequence[int]) -> tuple[tuple[Score, ...], ...]:
    found, at = [], 0
    for size in sizes:
        found.append(tuple(scores[at : at + size]))
        at += size
    return tuple(found)
