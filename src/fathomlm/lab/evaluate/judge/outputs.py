"""What is judged: a source, and one or two systems' completions of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fathomlm.errors import DataError, OptionError
from fathomlm.jsonfile import Fields
from fathomlm.lab.evaluate.tasks import read_rows, stem

SOURCES = ("source", "prompt")
"""Fields that may hold the source, in the order in which they are tried."""
OUTPUTS = ("text", "output")
"""Fields that may hold a system's text; `fathomlm eval generate --out` writes `text`."""
BOTH = ("output_a", "output_b")
"""Fields of a file that holds two systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """One source, and what the systems wrote for it."""

    number: int
    """Its place in the file, from 0."""
    source: str
    texts: tuple[str, ...]
    """One for each system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedOutputs:
    """All rows, and what the systems are called."""

    systems: tuple[str, ...]
    rows: tuple[JudgedRow, ...]


def read_outputs(
    paths: Sequence[Path],
    *,
    source: str | None = None,
    outputs: Sequence[str] = (),
    names: Sequence[str] = (),
    limit: int | None = None,
    draw: int | None = None,
    seed: int = 0,
) -> JudgedOutputs:
    """One file with one or two systems, or two files with one each, which must have the same sources line by line.

    `limit` takes the first rows; `draw` takes so many at random, the same ones for the same seed.
    """
    if not 1 <= len(paths) <= 2:
        raise OptionError(f"one or two files can be judged, got {len(paths)}")
    files = [read_rows(path, limit) for path in paths]
    fields = [_fields(rows[0], source, outputs, alone=len(paths) == 1) for rows in files]
    columns = [_column(rows, name) for rows, (_, texts) in zip(files, fields, strict=True) for name in texts]
    sources = [[_source(row, where) for row in rows] for rows, (where, _) in zip(files, fields, strict=True)]
    if len(paths) == 2:
        _check_alike(paths, sources)
    rows = tuple(
        JudgedRow(number=number, source=text, texts=texts)
        for number, (text, *texts_) in enumerate(zip(sources[0], *columns, strict=True))
        if (texts := tuple(texts_))
    )
    if draw is not None and draw < len(rows):
        rows = tuple(rows[number] for number in sorted(random.Random(seed).sample(range(len(rows)), draw)))
    return JudgedOutputs(systems=_systems(paths, fields[0][1], names), rows=rows)


def _fields(first: Fields, source: str | None, outputs: Sequence[str], *, alone: bool) -> tuple[str, tuple[str, ...]]:
    """Which fields hold the source and the systems' texts."""
    where = source or next((name for name in SOURCES if name in first), None)
    if outputs:
        if len(outputs) > (2 if alone else 1):
            raise OptionError("--output names one field of each of two files, or two fields of one file")
        found: tuple[str, ...] = tuple(outputs)
    elif alone and all(name in first for name in BOTH):
        found = BOTH
    else:
        found = tuple(name for name in OUTPUTS if name in first)[:1]
    if where is None or not found:
        raise OptionError(
            f"{first.where} has the fields {', '.join(first) or '(none)'}; set --source and --output, the fields with "
            "the source and the completion"
        )
    return where, found


def _source(row: Fields, name: str) -> str:
    text = row.text(name)
    if not text.strip():
        raise DataError(f"{row.where}: '{name}' is empty, so there is nothing to judge a text by")
    return text


def _column(rows: Sequence[Fields], name: str) -> list[str]:
    return [row.text(name) for row in rows]


def _check_alike(paths: Sequence[Path], sources: Sequence[Sequence[str]]) -> None:
    first, second = sources
    if len(first) != len(second):
        raise DataError(f"{paths[0]} has {len(first)} rows and {paths[1]} {len(second)}; both must answer the same sources")
    wrong = next((number for number, (one, two) in enumerate(zip(first, second, strict=True)) if one != two), None)
    if wrong is not None:
        raise DataError(f"row {wrong + 1} of {paths[0]} and of {paths[1]} have different sources")


def _systems(paths: Sequence[Path], fields: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    many = max(len(paths), len(fields))
    if names:
        if len(names) != many or len(set(names)) != many:
            raise OptionError(f"--names must give {many} different name{'s' * (many > 1)}, got {', '.join(names)}")
        return tuple(names)
    if len(paths) == 1:
        return tuple(fields) if many == 2 else (stem(paths[0]),)
    stems = tuple(stem(path) for path in paths)
    return stems if stems[0] != stems[1] else ("first", "second")
