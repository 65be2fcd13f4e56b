"""All questions about some material, asked several at a time, and only those that have no answer yet."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fathomlm.errors import require
from fathomlm.lab.evaluate.judge.answers import AnswerFile, key_of
from fathomlm.lab.evaluate.judge.client import Endpoint, JudgeError, NoHope, Reply, Stopped
from fathomlm.lab.evaluate.judge.prompts import Templates
from fathomlm.lab.evaluate.judge.rows import Material

Tick = Callable[[int, int], None]
Kind = Literal["likert", "pairwise"]
IN_A_ROW = 8
"""Questions that fail one after the other, each after all its tries, before the rest is not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, and what its answer is about."""

    kind: Kind
    row: int
    systems: tuple[int, ...]
    """The system whose text is scored, or both in the order in which they are shown."""
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Questions with their answers."""

    replies: dict[Question, Reply]
    failed: dict[Question, str]
    """What went wrong with those that got none."""
    kept: int
    """Questions that had been answered before."""


def questions(material: Material, templates: Templates, kinds: Sequence[Kind]) -> list[Question]:
    """Each text's scores; each pair in both orders, since judges prefer a place (thesis 2.6.3)."""
    found = []
    for row in material.rows:
        if "likert" in kinds:
            for system, text in enumerate(row.texts):
                prompt = templates.scores(row.source, text)
                found.append(Question(kind="likert", row=row.number, systems=(system,), prompt=prompt))
        if "pairwise" in kinds:
            for order in ((0, 1), (1, 0)):
                prompt = templates.better(row.source, *(row.texts[system] for system in order))
                found.append(Question(kind="pairwise", row=row.number, systems=order, prompt=prompt))
    return found


def ask_all(
    asked: Sequence[Question],
    endpoint: Endpoint,
    answers: AnswerFile,
    *,
    concurrency: int = 4,
    again: Callable[[Question, Reply], bool] | None = None,
    on_done: Tick | None = None,
) -> Asked:
    """Prompts that are word for word the same are asked once. `again` says which kept answers to ask for anew.

    Workers do nothing but ask; one thread keeps the answers. They are daemons, so that an interrupted command ends at once.
    """
    require(concurrency >= 1, "--concurrency", ">= 1", concurrency)
    keys = {question: key_of(endpoint, question.prompt) for question in asked}
    stale = set() if again is None else {k for q, k in keys.items() if k in answers.found and again(q, answers.found[k])}
    new = {key: question for question, key in keys.items() if key not in answers.found or key in stale}
    kept = sum(key not in new for key in keys.values())
    failed = _ask_new(new, endpoint, answers, concurrency, on_done)
    return Asked(
        replies={question: answers.found[key] for question, key in keys.items() if key not in failed},
        failed={question: failed[key] for question, key in keys.items() if key in failed},
        kept=kept,
    )


def _ask_new(
    new: dict[str, Question], endpoint: Endpoint, answers: AnswerFile, concurrency: int, on_done: Tick | None
) -> dict[str, str]:
    """What failed, and why, by key."""
    waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Reply | BaseException]] = queue.SimpleQueue()
    for key, question in new.items():
        waiting.put((key, question.prompt))
    workers = min(concurrency, len(new))
    for _ in range(workers):
        waiting.put(None)
    stop = threading.Event()
    for _ in range(workers):
        threading.Thread(target=_work, args=(endpoint, waiting, done, stop), daemon=True).start()
    failed: dict[str, str] = {}
    in_a_row = 0
    try:
        for number in range(1, len(new) + 1):
            key, found = done.get()
            if isinstance(found, Reply):
                answers.keep(key, found, _about(new[key], endpoint))
                in_a_row = 0
            elif isinstance(found, JudgeError) and not isinstance(found, NoHope):
                failed[key] = str(found)
                in_a_row += 1
                if in_a_row == IN_A_ROW:
                    raise JudgeError(f"{IN_A_ROW} questions in a row got no answer, so the rest is not asked: {found}")
            else:
                raise found
            if on_done is not None:
                on_done(number, len(new))
    finally:
        stop.set()
    return failed


def _work(
    endpoint: Endpoint,
    waiting: queue.SimpleQueue[tuple[str, str] | None],
    done: queue.SimpleQueue[tuple[str, Reply | BaseException]],
    stop: threading.Event,
) -> None:
    while (item := waiting.get()) is not None:
        key, prompt = item
        try:
            done.put((key, endpoint.ask(prompt, stop)))
        except Stopped:
            return
        except BaseException as error:  # raised again where the answers are kept, so that a bug keeps its traceback
            done.put((key, error))


def _about(question: Question, endpoint: Endpoint) -> dict[str, Any]:
    about = {"model": endpoint.model, "kind": question.kind, "row": question.row}
    return about | {"systems": list(question.systems)}
