"""All questions about some completions, several at a time, and only those that have no answer yet.

Answers are kept as JSON lines. A line is written when its answer comes, so that nothing is lost to an interruption. What a
judge's answer is stored as it is, not as parsed: a later version may parse more.

In the end answers come to mean scores with their errors, and wins that do not depend on the order. The thesis counts every
order as a vote of its own (2.6.3: 101 against 99 of 200), so a judge that always prefers the first text gives both systems
half of the votes. Here a system wins a row only where both orders agree, and what followed the place is counted by itself.
The votes are there too, for comparison.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from fathomlm.errors import DataError, require, writing
from fathomlm.jsonfile import MAX_LINE, bounded_lines, parse_object
from fathomlm.lab.evaluate.judge.client import Endpoint, EndpointError, JudgeError, Reply
from fathomlm.lab.evaluate.judge.outputs import JudgedOutputs
from fathomlm.lab.evaluate.judge.prompts import HIGHEST, LOWEST, Templates, Verdict, read_scores, read_verdict

OnProgress = Callable[[int, int], None]
Kind = Literal["likert", "pairwise"]
IN_A_ROW = 8
"""Questions that fail one after the other, each after all its tries, before the rest is not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeQuestion:
    """One prompt, and what its answer is about."""

    kind: Kind
    row: int
    systems: tuple[int, ...]
    """The system whose text is scored, or both in the order in which they are shown."""
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Questions with their answers."""

    replies: dict[JudgeQuestion, Reply]
    failed: dict[JudgeQuestion, str]
    """What went wrong with those that got none."""
    kept: int
    """Questions that had been answered before."""


def questions(judged: JudgedOutputs, templates: Templates, kinds: Sequence[Kind]) -> list[JudgeQuestion]:
    """Each text's scores; each pair in both orders, since judges prefer a place (thesis 2.6.3)."""
    found = []
    for row in judged.rows:
        if "likert" in kinds:
            for system, text in enumerate(row.texts):
                prompt = templates.scores(row.source, text)
                found.append(JudgeQuestion(kind="likert", row=row.number, systems=(system,), prompt=prompt))
        if "pairwise" in kinds:
            for order in ((0, 1), (1, 0)):
                prompt = templates.better(row.source, *(row.texts[system] for system in order))
                found.append(JudgeQuestion(kind="pairwise", row=row.number, systems=order, prompt=prompt))
    return found


def key_of(endpoint: Endpoint, prompt: str) -> str:
    """The same for the same words to the same judge in the same way; anything else is another question."""
    request = json.dumps([endpoint.base_url.rstrip("/"), endpoint.request(prompt)], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


class AnswerFile:
    """Answers by key, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Reply] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> AnswerFile:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        try:
            self._load(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def keep(self, key: str, reply: Reply, about: dict[str, Any]) -> None:
        """`about` says what was asked, for people who read the file."""
        assert self._file is not None
        line = json.dumps({"key": key, **about, **asdict(reply)}, ensure_ascii=False)
        with writing(self.path):
            self._file.write(line.encode("utf-8", "replace") + b"\n")
            self._file.flush()
        self.found[key] = reply

    def _load(self, file: IO[bytes]) -> None:
        """A last line without an end was being written when its process died; it goes."""
        file.seek(0)
        whole = 0
        for number, line in enumerate(bounded_lines(file, MAX_LINE, str(self.path), error=DataError), start=1):
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(line)
            self._take(line, number)
        file.seek(0, 2)

    def _take(self, line: bytes, number: int) -> None:
        try:
            record = parse_object(line, f"{self.path} line {number}", error=DataError)
            reply = Reply(record.text("text"), record.text("finish", default=None))
            self.found[record.text("key")] = reply
        except DataError as error:
            raise DataError(
                f"{self.path} line {number} is not a judge's answer; --answers takes a file of its own ({error})"
            ) from error


def ask_all(
    pending: Sequence[JudgeQuestion],
    endpoint: Endpoint,
    answers: AnswerFile,
    *,
    concurrency: int = 4,
    again: Callable[[JudgeQuestion, Reply], bool] | None = None,
    on_done: OnProgress | None = None,
) -> Answers:
    """Prompts that are word for word the same are asked once. `again` says which kept answers to ask for anew."""
    require(concurrency >= 1, "--concurrency", ">= 1", concurrency)
    keys = {question: key_of(endpoint, question.prompt) for question in pending}
    stale = set() if again is None else {k for q, k in keys.items() if k in answers.found and again(q, answers.found[k])}
    new = {key: question for question, key in keys.items() if key not in answers.found or key in stale}
    kept = sum(key not in new for key in keys.values())
    failed = asyncio.run(_ask_new(new, endpoint, answers, concurrency, on_done)) if new else {}
    return Answers(
        replies={question: answers.found[key] for question, key in keys.items() if key not in failed},
        failed={question: failed[key] for question, key in keys.items() if key in failed},
        kept=kept,
    )


async def _ask_new(
    new: dict[str, JudgeQuestion], endpoint: Endpoint, answers: AnswerFile, concurrency: int, on_done: OnProgress | None
) -> dict[str, str]:
    """What failed, and why, by key."""
    waiting = iter(new.items())
    failed: dict[str, str] = {}
    done = in_a_row = 0

    async def work(client: Any) -> None:
        nonlocal done, in_a_row
        for key, question in waiting:
            try:
                answers.keep(key, await endpoint.ask(client, question.prompt), _about(question, endpoint))
                in_a_row = 0
            except EndpointError:
                raise
            except JudgeError as error:
                failed[key] = str(error)
                in_a_row += 1
                if in_a_row == IN_A_ROW:
                    message = f"{IN_A_ROW} questions in a row got no answer, so the rest is not asked: {error}"
                    raise JudgeError(message) from error
            done += 1
            if on_done is not None:
                on_done(done, len(new))

    try:
        async with endpoint.client() as client, asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(new))):
                group.create_task(work(client))
    except BaseExceptionGroup as errors:  # the first of them stopped the others
        raise errors.exceptions[0] from None
    return failed


def _about(question: JudgeQuestion, endpoint: Endpoint) -> dict[str, Any]:
    about = {"model": endpoint.model, "kind": question.kind, "row": question.row}
    return about | {"systems": list(question.systems)}


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
