"""Rows of JSON lines, plain or compressed, each with the place that a message about it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fathomlm.errors import DataError
from fathomlm.jsonfile import Fields, parse_object
from fathomlm.train.data.sources import MOST, missing, open_lines

NAMES = re.compile(r"\.jsonl(\.(gz|xz|zst))?$", re.IGNORECASE)


def read_rows(path: Path, limit: int | None = None) -> list[Fields]:
    """The first `limit` rows of a file, or all; a file without any is an error."""
    rows = list(islice(_rows(path), limit))
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _rows(path: Path) -> Iterator[Fields]:
    if not path.is_file():
        raise DataError(missing(path, "file"))
    if NAMES.search(path.name) is None:
        raise DataError(f"{path}: rows are read from .jsonl files (also .gz, .xz, .zst)")
    for number, (line, _) in enumerate(open_lines(path), start=1):
        where = f"{path} line {number}"
        if line is None:
            raise DataError(f"{where} has more than {MOST:,} bytes, the most that a row may have")
        if line.strip():
            yield parse_object(line, where, error=DataError, nonfinite=True)


def one_or_more(row: Fields, name: str) -> tuple[str, ...]:
    """A field that holds one text, or a list of at least one."""
    found = row.texts(name) if isinstance(row.raw(name), list) else [row.text(name)]
    if not found:
        raise row.wrong(name, "a string or a list of strings")
    return tuple(found)
