"""Likelihood tasks from files: rows as questions, worked examples before them, scores counted.

The form of a file is known by its fields. Prompts are those of lm-evaluation-harness for the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fathomlm.errors import DataError, OptionError
from fathomlm.fields import Fields
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.evaluate.scoring import Score, Scorer, TextEncoder, TextPair, perplexity_of
from fathomlm.lab.evaluate.tasks import Metrics, accuracy_error, named, one_or_more, read_rows, shots_file

BETWEEN = "\n\n"
"""Between worked examples, and between them and the question."""
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question."""

    requests: tuple[TextPair, ...]
    """Context and continuation of each choice; a single one where a word is to be predicted."""
    gold: int
    """Which is right."""
    lengths: tuple[int, ...]
    """Bytes of each choice, by which its log-likelihood is divided for `acc_norm`."""
    preamble: str = ""
    """What stands once before everything, worked examples included."""
    subject: str | None = None
    """Worked examples are of the same."""

    @property
    def example(self) -> str:
        """The question with its right answer, as a worked example for another."""
        context, continuation = self.requests[self.gold]
        return context + continuation

    def behind(self, text: str) -> tuple[TextPair, ...]:
        """What is scored, with a text in front."""
        return tuple((self.preamble + text + context, continuation) for context, continuation in self.requests)


@dataclass(frozen=True, slots=True)
class TaskForm:
    """One form of rows."""

    fields: tuple[str, ...]
    """Those that it needs; it is recognised by them."""
    build: Callable[[Fields, bool], Question]
    """`bare` leaves out the words Question and Answer."""
    word: bool = False
    """Whether a word is predicted, so that there is nothing to choose from."""
    same: bool = False
    """Whether all choices have the same continuation, so that there is nothing to normalise."""


def _word(row: Fields, bare: bool) -> Question:
    target = row.text("target")
    return Question(requests=((row.text("context"), f" {target}"),), gold=0, lengths=(_bytes(target),))


def _options(row: Fields, bare: bool) -> Question:
    contexts, continuation = _several(row, "context_options"), row.text("continuation")
    requests = tuple((context, f" {continuation.strip()}") for context in contexts)
    return Question(
        requests=requests,
        gold=row.integer("gold", at_least=0, at_most=len(contexts) - 1),
        lengths=(_bytes(continuation),) * len(contexts),
    )


def _subject(row: Fields, bare: bool) -> Question:
    subject = row.text("subject").replace("_", " ")
    preamble = f"The following are questions (with answers) about {subject}.\n\n"
    return _chosen(row, _question(row, bare), preamble, subject)


FORMS: dict[str, TaskForm] = {
    "word": TaskForm(("context", "target"), _word, word=True),
    "context options": TaskForm(("context_options", "continuation", "gold"), _options, same=True),
    "passage": TaskForm(
        ("passage", "question", "choices", "gold"),
        lambda row, bare: _chosen(row, f"{row.text('passage').strip()}\n{_question(row, bare)}"),
    ),
    "subject": TaskForm(("subject", "question", "choices", "gold"), _subject),
    "question": TaskForm(("question", "choices", "gold"), lambda row, bare: _chosen(row, _question(row, bare))),
    "continuation": TaskForm(("context", "choices", "gold"), lambda row, bare: _chosen(row, row.text("context"))),
}
"""In the order in which they are tried."""


def recognise(row: Fields) -> TaskForm:
    """The form of a file, by its first row."""
    for form in FORMS.values():
        if all(name in row for name in form.fields):
            return form
    forms = "; ".join(", ".join(form.fields) for form in FORMS.values())
    raise DataError(
        f"{row.where}: no task has the fields {', '.join(row) or '(none)'}; known forms: {forms}. Generation tasks are "
        "for `fathomlm eval generate`, plain text for `fathomlm eval ppl`"
    )


def _question(row: Fields, bare: bool) -> str:
    question = row.text("question").strip()
    return question if bare else f"Question: {question}\nAnswer:"


def _chosen(row: Fields, context: str, preamble: str = "", subject: str | None = None) -> Question:
    found = _several(row, "choices")
    return Question(
        requests=tuple((context, f" {choice}") for choice in found),
        gold=row.integer("gold", at_least=0, at_most=len(found) - 1),
        lengths=tuple(_bytes(choice) for choice in found),
        preamble=preamble,
        subject=subject,
    )


def _several(row: Fields, name: str) -> tuple[str, ...]:
    found = one_or_more(row, name)
    if len(found) < 2:
        raise DataError(f"{row.where}: '{name}' must have at least two choices, got {len(found)}")
    if not all(text.strip() for text in found):
        raise DataError(f"{row.where}: a choice in '{name}' is empty")
    return found


def _bytes(text: str) -> int:
    return max(1, len(text.encode("utf-8")))


class Example(Protocol):
    """What can be shown with its answer."""

    @property
    def example(self) -> str: ...

    @property
    def subject(self) -> str | None: ...


E = TypeVar("E", bound=Example)


def worked_examples(items: Sequence[E], pool: Sequence[E] | None, shots: int) -> list[str]:
    """For each item the text of its examples, ending where its own begins; empty without shots.

    They come from `pool`, another part of the same task, or where that is None from the items but for the one that is
    asked. Which ones depends on the seed and on the row's number only, so that a limit or another order changes nothing.
    """
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
        raise DataError(f"{shots} worked examples requested, but there are only {len(there)}{of} to take")
    chosen = random.Random(f"{SEED}:{number}").sample(there, shots)
    return "".join(source[other].example + BETWEEN for other in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTask:
    """A file that was read, and what stands before each of its questions."""

    name: str
    path: Path
    form: TaskForm
    items: tuple[Question, ...]
    examples: tuple[str, ...]
    shots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTask:
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
    form = recognise(rows[0])
    items = [form.build(row, bare) for row in rows]
    pool = None if source is None else [form.build(row, bare) for row in read_rows(source)]
    examples = worked_examples(items, pool, shots)
    return LocalTask(
        name=name,
        path=path,
        form=form,
        items=tuple(items[:limit]),
        examples=tuple(examples[:limit]),
        shots=shots,
    )


def answer(task: LocalTask, scorer: Scorer, encoder: TextEncoder, on_done: OnProgress = unwatched) -> list[AnsweredTask]:
    """The task at each of the scorer's outputs."""
    requests = [item.behind(text) for item, text in zip(task.items, task.examples, strict=True)]
    try:
        pairs = encoder.pairs([pair for item in requests for pair in item])
        found = scorer.score(pairs, on_done)
    except DataError as error:
        raise DataError(f"{task.path}: {error}") from error
    sizes = [len(item) for item in requests]
    grouped = [_group(scores, sizes) for scores in found]
    return [AnsweredTask(scores=scores, metrics=count(task.form, task.items, scores)) for scores in grouped]


def count(form: TaskForm, items: Sequence[Question], scores: Sequence[Sequence[Score]]) -> Metrics:
    """The metrics of a task. Among equals the first choice counts as chosen, as in lm-evaluation-harness."""
    if form.word:
        right = [score.greedy for (score,) in scores]
        mean = sum(score.log_likelihood for (score,) in scores) / len(scores)
        return {"examples": len(items), **accuracy("acc", right), "perplexity": perplexity_of(mean)}
    plain = [_best([score.log_likelihood for score in each]) for each in scores]
    found: Metrics = {"examples": len(items)}
    found |= accuracy("acc", [best == item.gold for best, item in zip(plain, items, strict=True)])
    if not form.same:
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


def samples(task: LocalTask, answered: AnsweredTask) -> list[dict[str, Any]]:
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
