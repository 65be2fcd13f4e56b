"""Rows of JSON lines, plain or compressed, each with the place that a message about it names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.errors import DataError
from fathomlm.train.data.compressed import MOST, json_of, open_lines

NAMES = re.compile(r"\.jsonl(\.(gz|xz|zst))?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One object of a file."""

    fields: dict[str, Any]
    where: str
    """Its file and line."""

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: '{name}' holds {_kind(value)}, not text")
        return self._whole(name, value)

    def texts(self, name: str) -> tuple[str, ...]:
        """One text, or a list of at least one."""
        value = self._get(name)
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
            raise DataError(f"{self.where}: '{name}' must be a text or a list of texts, got {_kind(value)}")
        return tuple(self._whole(name, text) for text in found)

    def index(self, name: str, below: int) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
            raise DataError(f"{self.where}: '{name}' must be from 0 to {below - 1}, one of the choices; got {value!r}")
        return value

    def _get(self, name: str) -> Any:
        if name not in self.fields:
            near = difflib.get_close_matches(name, self.fields, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise DataError(f"{self.where}: no field '{name}'{hint}; it has: {', '.join(self.fields) or 'none'}")
        return self.fields[name]

    def _whole(self, name: str, text: str) -> str:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{self.where}: '{name}' holds half a character (a lone surrogate)") from error
        return text


def read_rows(path: Path, limit: int | None = None) -> list[JsonRow]:
    """The first `limit` rows of a file, or all; a file without any is an error."""
    rows: list[JsonRow] = []
    for row in _rows(path):
        if limit is not None and len(rows) == limit:
            break
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _rows(path: Path) -> Iterator[JsonRow]:
    if not path.is_file():
        raise DataError(missing(path))
    if NAMES.search(path.name) is None:
        raise DataError(f"{path}: rows are read from .jsonl files (also .gz, .xz, .zst)")
    for number, (line, _) in enumerate(open_lines(path), start=1):
        where = f"{path} line {number}"
        if line is None:
            raise DataError(f"{where} has more than {MOST:,} bytes, the most that a row may have")
        if not line.strip():
            continue
        record = json_of(line, number, where)
        if not isinstance(record, dict):
            raise DataError(f"{where}: {_kind(record)}, not a JSON object")
        yield JsonRow(record, where)


def missing(path: Path) -> str:
    """The message for a file that is not there, with the nearest name beside it."""
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f" (did you mean {path.parent / near[0]}?)" if near else ""
    return f"the file {path} does not exist{hint}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
