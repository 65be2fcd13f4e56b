"""`fathomlm eval judge FILE [FILE]`: completions judged by a language model, and what its answers come to: mean scores with
their errors, and wins that do not depend on the order.

The thesis counts every order as a vote of its own (2.6.3: 101 against 99 of 200), so a judge that always prefers the first
text gives both systems half of the votes. Here a system wins a row only where both orders agree, and what followed the place
is counted by itself. The votes are there too, for comparison.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm import __version__
from fathomlm.cli.common import read_text
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.evaluate.judge_client import Reply
from fathomlm.lab.evaluate.judge_prompts import (
    HIGHEST,
    LOWEST,
    JudgedOutputs,
    Templates,
    Verdict,
    read_outputs,
    read_scores,
    read_verdict,
)
from fathomlm.lab.evaluate.judge_questions import (
    AnswerFile,
    Answers,
    JudgeQuestion,
    Kind,
    ask_all,
    questions,
)
from fathomlm.lab.evaluate.options import Judge
from fathomlm.lab.evaluate.tasks import stem

_COUNTS = ("read", "unreadable", "failed")


def run(options: Judge) -> int:
    templates = _templates(options)
    material = read_outputs(
        options.files, source=options.source, outputs=options.output, names=options.names, limit=options.limit,
        draw=options.draw, seed=options.seed,
    )  # fmt: skip
    kinds = _kinds(options, len(material.systems))
    path = options.asking.answers or Path("analysis") / f"judge-{stem(options.files[0])}.jsonl"
    begun = time.perf_counter()
    with AnswerFile(path) as answers, progress_bar("asking", unit="questions") as update:
        outcome = ask_all(
            questions(material, templates, kinds),
            options.endpoint,
            answers,
            concurrency=options.asking.concurrency,
            again=partial(is_unreadable, dimensions=templates.dimensions) if options.asking.again else None,
            on_done=update,
        )
    record = _record(options, material, kinds, templates, outcome) | {
        "answers": str(path),
        "seconds": time.perf_counter() - begun,
    }
    _warn(record, outcome)
    options.answer(record, _print)
    return 1 if outcome.failed else 0


def _kinds(options: Judge, systems: int) -> tuple[Kind, ...]:
    if options.questions.ask in ("pairwise", "both") and systems == 1:
        raise OptionError(
            f"--ask {options.questions.ask} compares two systems; give a second file, or a file with output_a and output_b"
        )
    if options.questions.ask in ("likert", "pairwise"):
        return (options.questions.ask,)
    return ("likert", "pairwise") if systems == 2 else ("likert",)


def _templates(options: Judge) -> Templates:
    given: dict[str, Any] = {}
    if options.questions.dimensions:
        given["dimensions"] = options.questions.dimensions
    for name in ("likert", "pairwise"):
        path = getattr(options.questions, f"{name}_template")
        if path is not None:
            given[name] = read_text(path)
    return Templates(**given)


def _record(
    options: Judge, material: JudgedOutputs, kinds: tuple[Kind, ...], templates: Templates, outcome: Answers
) -> dict[str, Any]:
    return {
        "kind": "judge",
        "judge": options.endpoint.model,
        "base_url": options.endpoint.base_url,
        "version": __version__,
        "data": [str(path) for path in options.files],
        "systems": list(material.systems),
        "rows": len(material.rows),
        "asked": len(outcome.replies) + len(outcome.failed) - outcome.kept,
        "kept": outcome.kept,
        "failed": len(outcome.failed),
        "likert": likert(outcome, material.systems, templates.dimensions) if "likert" in kinds else None,
        "pairwise": pairwise(outcome, material.systems) if "pairwise" in kinds else None,
    }


def _warn(record: dict[str, Any], outcome: Answers) -> None:
    counted = [*(record["likert"]["systems"].values() if record["likert"] else ()), *filter(None, [record["pairwise"]])]
    unreadable, cut = (sum(each[name] for each in counted) for name in ("unreadable", "cut"))
    if unreadable:
        hint = f"; {cut} of them were cut off, so a larger --max-tokens may help" if cut else ""
        print(f"fathomlm: {unreadable} answers could not be read and are not counted{hint}", file=sys.stderr)
    if outcome.failed:
        why = next(iter(outcome.failed.values()))
        many = f"{len(outcome.failed)} questions got no answer"
        print(f"fathomlm: {many}; the same command asks for them again. The first: {why}", file=sys.stderr)


def _print(record: dict[str, Any]) -> None:
    if record["likert"]:
        systems = record["likert"]["systems"]
        rows = [["points from 1 to 5", *systems]]
        rows += [
            [dimension, *(_score(each["scores"][dimension]) for each in systems.values())]
            for dimension in record["likert"]["dimensions"]
        ]
        rows += [[f"completions {what}", *(str(each[what]) for each in systems.values())] for what in _COUNTS]
        print_table(rows)
    if (found := record["pairwise"]) is not None:
        place = found["position"]
        rows = [["wins, both orders agreeing", "rows"]]
        rows += [[name, str(wins)] for name, wins in found["wins"].items()]
        rows += [["tie", str(found["ties"])], ["not counted", str(found["rows"] - found["rows_counted"])]]
        print_table(rows)
        votes = ", ".join(f"{name} {many}" for name, many in found["votes"].items())
        print(f"Votes, each order by itself: {votes}.")
        if place["first_chosen"] is not None:
            print(
                f"The first completion was chosen in {place['first_chosen']:.1%} of the answers; always the first in "
                f"{place['always_first']} rows, always the second in {place['always_second']}."
            )


def _score(score: dict[str, Any]) -> str:
    if score["mean"] is None:
        return "-"
    return f"{score['mean']:.2f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.2f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """How many questions there were and what became of them."""

    questions: int
    read: int
    unreadable: int
    cut: int
    """Of the unreadable ones, those that ended because no more tokens were allowed."""
    failed: int


def is_unreadable(question: JudgeQuestion, reply: Reply, dimensions: Sequence[str]) -> bool:
    read = read_scores(reply.text, dimensions) if question.kind == "likert" else read_verdict(reply.text)
    return read is None


def count(answers: Answers, kind: str, dimensions: Sequence[str], system: int | None = None) -> AnswerCounts:
    """Of one kind of question; of those about one system's texts where one is given."""

    def mine(question: JudgeQuestion) -> bool:
        return question.kind == kind and (system is None or question.systems == (system,))

    replies = {question: reply for question, reply in answers.replies.items() if mine(question)}
    bad = [reply for question, reply in replies.items() if is_unreadable(question, reply, dimensions)]
    failed = sum(mine(question) for question in answers.failed)
    return AnswerCounts(
        questions=len(replies) + failed,
        read=len(replies) - len(bad),
        unreadable=len(bad),
        cut=sum(reply.finish == "length" for reply in bad),
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
    votes = Counter(system for each in verdicts.values() for order, given in each.items() for system in _voted(order, given))
    given = Counter(verdict for each in verdicts.values() for verdict in each.values())
    places = given["first"] + given["second"]
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
            "first_chosen": given["first"] / places if places else None,
            "always_first": sum(pair == ("first", "first") for pair in whole),
            "always_second": sum(pair == ("second", "second") for pair in whole),
            "orders_agree": sum(_outcome(*p) is not None or p == ("tie", "tie") for p in whole) / len(whole)
            if whole
            else None,
        },
    }


def _outcome(shown: Verdict, swapped: Verdict) -> int | None:
    """The winner of a row, by the verdicts in both orders; None for a tie."""
    if (shown, swapped) == ("first", "second"):
        return 0
    return 1 if (shown, swapped) == ("second", "first") else None


def _voted(order: Sequence[int], given: Verdict) -> tuple[int, ...]:
    return () if given == "tie" else (order[0] if given == "first" else order[1],)


def _summary(points: Sequence[int]) -> dict[str, Any]:
    counts = {str(value): sum(each == value for each in points) for value in range(LOWEST, HIGHEST + 1)}
    if not points:
        return {"mean": None, "stderr": None, "counts": counts}
    mean = sum(points) / len(points)
    spread = sum((each - mean) ** 2 for each in points)
    error = math.sqrt(spread / (len(points) - 1) / len(points)) if len(points) > 1 else None
    return {"mean": mean, "stderr": error, "counts": counts}
