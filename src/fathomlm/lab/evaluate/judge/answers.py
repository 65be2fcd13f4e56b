"""Answers that were given, kept as JSON lines: what is there is not asked again.

A line is written when its answer comes, so that nothing is lost to an interruption. What a judge said is kept, not what was
read from it: a later version may read more.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fathomlm.errors import DataError, OutputError
from fathomlm.jsonfile import MAX_LINE, bounded_lines, parse_object
from fathomlm.lab.evaluate.judge.client import Endpoint, Reply


def key_of(endpoint: Endpoint, prompt: str) -> str:
    """The same for the same words to the same judge in the same way; anything else is another question."""
    asked = json.dumps([endpoint.base_url.rstrip("/"), endpoint.request(prompt)], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


class AnswerFile:
    """Answers by key, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Reply] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> AnswerFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error
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
        try:
            self._file.write(line.encode("utf-8", "replace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error
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
                f"{self.path} line {number} is no answer of a judge; --answers takes a file of its own ({error})"
            ) from error
