"""The thesis' tables: one number a column, and their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fathomlm.lab.evaluate.likelihood import Metrics
from fathomlm.lab.evaluate.tasks import GROUPS


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
