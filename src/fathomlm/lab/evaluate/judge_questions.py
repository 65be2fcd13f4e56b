"""All questions about some completions, several at a time, and only those that have no answer yet.

Answers are kept as JSON lines. A line is written when its answer comes, so that nothing is lost to an interruption. What a
judge's answer is stored as it is, not as parsed: a later version may parse more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from fathomlm.errors import DataError, require, writing
from fathomlm.jsonfile import MAX_LINE, bounded_lines, parse_object
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.evaluate.judge_client import Endpoint, EndpointError, JudgeError, Reply
from fathomlm.lab.evaluate.judge_prompts import JudgedOutputs, Templates

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
    on_done: OnProgress = unwatched,
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
    new: dict[str, JudgeQuestion], endpoint: Endpoint, answers: AnswerFile, concurrency: int, on_done: OnProgress
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
