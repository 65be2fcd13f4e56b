"""Worked examples in front of a question.

They come from another part of the same task where there is one, else from the task's own rows but for the one that is asked.
Which ones depends on the seed and on the row's number only, so that a limit or another order changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from fathomlm.errors import DataError

BETWEEN = "\n\n"
"""Between worked examples, and between them and the question."""
SEED = 1234


class Example(Protocol):
    """What can be shown with its answer."""

    @property
    def example(self) -> str: ...

    @property
    def subject(self) -> str | None: ...


E = TypeVar("E", bound=Example)


def worked_examples(items: Sequence[E], pool: Sequence[E] | None, shots: int) -> list[str]:
    """For each item the text of its examples, ending where its own begins; empty without shots. `pool` is None where the
    items themselves are to serve."""
    if not shots:
        return [""] * len(items)
    subjects: dict[str | None, list[int]] = {}
    source = items if pool is None else pool
    for number, item in enumerate(source):
        subjects.setdefault(item.subject, []).append(number)
    return [_examples(item, number, source, subjects, shots, own=pool is None) for number, item in enumerate(items)]


def _examples(
    item: E, number: int, source: Sequence[E], subjects: dict[str | None, list[int]], shots: int, own: bool
) -> str:
    there = [other for other in subjects.get(item.subject, ()) if not own or other != number]
    if len(there) < shots:
        of = "" if item.subject is None else f" about {item.subject}"
        raise DataError(f"{shots} worked examples are asked for, and there are {len(there)}{of} to take")
    chosen = random.Random(f"{SEED}:{number}").sample(there, shots)
    return "".join(source[other].example + BETWEEN for other in chosen)
