"""What all answers come to: mean scores with their errors, and wins that do not depend on the order.

The thesis counts every order as a vote of its own (2.6.3: 101 against 99 of 200). So a judge that always prefers the first
text gives both systems half of the votes. Here a system wins a row only where both orders agree, and what followed the place
is counted by itself. The votes are there too, for comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fathomlm.lab.evaluate.judge.client import Reply
from fathomlm.lab.evaluate.judge.prompts import HIGHEST, LOWEST, Verdict, read_scores, read_verdict
from fathomlm.lab.evaluate.judge.questions import Answers, Question

_CUT = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """How many questions there were and what became of them."""

    questions: int
    read: int
    unreadable: int
    cut: int
    """Of the unreadable ones, those that ended because no more tokens were allowed."""
    failed: int


def is_unreadable(question: Question, reply: Reply, dimensions: Sequence[str]) -> bool:
    read = read_scores(reply.text, dimensions) if question.kind == "likert" else read_verdict(reply.text)
    return read is None


def count(answers: Answers, kind: str, dimensions: Sequence[str], system: int | None = None) -> AnswerCounts:
    """Of one kind of question; of those about one system's texts where one is given."""

    def mine(question: Question) -> bool:
        return question.kind == kind and (system is None or question.systems == (system,))

    replies = {question: reply for question, reply in answers.replies.items() if mine(question)}
    bad = [reply for question, reply in replies.items() if is_unreadable(question, reply, dimensions)]
    failed = sum(mine(question) for question in answers.failed)
    return AnswerCounts(
        questions=len(replies) + failed,
        read=len(replies) - len(bad),
        unreadable=len(bad),
        cut=sum(reply.finish == _CUT for reply in bad),
        failed=failed,
    )


def likert(answers: Answers, systems: Sequence[str], dimensions: Sequence[str]) -> dict[str, Any]:
    """For each system and dimension the mean, its standard error, and how often each number of points was given."""
    found = {}
    for number, name in enumerate(systems):
        read = [
            scores
            for question, reply in answers.replies.items()
            if question.kind == "likert"
            and question.systems == (number,)
            and (scores := read_scores(reply.text, dimensions)) is not None
        ]
        found[name] = asdict(count(answers, "likert", dimensions, number)) | {
            "scores": {dimension: _summary([scores[dimension] for scores in read]) for dimension in dimensions}
        }
    return {"dimensions": list(dimensions), "systems": found}


def pairwise(answers: Answers, systems: Sequence[str]) -> dict[str, Any]:
    """Wins, ties and what followed the place. A row counts where both orders could be read."""
    verdicts: dict[int, dict[tuple[int, ...], Verdict]] = {}
    for question, reply in answers.replies.items():
        if question.kind == "pairwise" and (verdict := read_verdict(reply.text)) is not None:
            verdicts.setdefault(question.row, {})[question.systems] = verdict
    rows = {question.row for question in (*answers.replies, *answers.failed) if question.kind == "pairwise"}
    whole = [(each[0, 1], each[1, 0]) for each in verdicts.values() if len(each) == 2]
    outcomes = Counter(_outcome(*pair) for pair in whole)
    votes = Counter(system for each in verdicts.values() for order, said in each.items() for system in _voted(order, said))
    said = Counter(verdict for each in verdicts.values() for verdict in each.values())
    places = said["first"] + said["second"]
    return asdict(count(answers, "pairwise", ())) | {
        "rows": len(rows),
        "rows_counted": len(whole),
        "wins": {name: outcomes[number] for number, name in enumerate(systems)},
        "ties": outcomes[None],
        "win_rate": {
            name: (outcomes[number] + outcomes[None] / 2) / len(whole) if whole else None
            for number, name in enumerate(systems)
        },
        "votes": {name: votes[number] for number, name in enumerate(systems)},
        "position": {
            "first_chosen": said["first"] / places if places else None,
            "always_first": sum(pair == ("first", "first") for pair in whole),
            "always_second": sum(pair == ("second", "second") for pair in whole),
            "orders_agree": sum(_outcome(*p) is not None or p == ("tie", "tie") for p in whole) / len(whole)
            if whole
            else None,
        },
    }


def _outcome(shown: Verdict, swapped: Verdict) -> int | None:
    """Who wins a row, by what was said in the systems' order and with them swapped; None where nobody does."""
    if (shown, swapped) == ("first", "second"):
        return 0
    return 1 if (shown, swapped) == ("second", "first") else None


def _voted(order: Sequence[int], said: Verdict) -> tuple[int, ...]:
    return () if said == "tie" else (order[0] if said == "first" else order[1],)


def _summary(points: Sequence[int]) -> dict[str, Any]:
    counts = {str(value): sum(each == value for each in points) for value in range(LOWEST, HIGHEST + 1)}
    if not points:
        return {"mean": None, "stderr": None, "counts": counts}
    mean = sum(points) / len(points)
    spread = sum((each - mean) ** 2 for each in points)
    error = math.sqrt(spread / (len(points) - 1) / len(points)) if len(points) > 1 else None
    return {"mean": mean, "stderr": error, "counts": counts}
