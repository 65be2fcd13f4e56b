"""JSON that came from somewhere else, read without believing it.

One reader for every JSON file and every JSON line that FathomLM did not make in the same process. It bounds bytes, nesting
and digits, refuses what JSON does not define (duplicate keys, NaN, numbers beyond a float) and gives fields by type:

    config = read_object(directory / "config.json", error=CheckpointError)
    layers = config.integer("num_hidden_layers", at_least=1, at_most=4096)

Whatever is wrong is raised as the caller's error type, in one line that names the file, the field, the rule and the value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fathomlm.fields import SHOWN, Fields, Raises, kind_of, shown_name

MAX_BYTES = 16 << 20
"""Of a whole file. A configuration has kilobytes; the index of the largest public checkpoint has 9 MB."""
MAX_LINE = 16 << 20
"""Of one line of JSON lines."""
MAX_DEPTH = 64
"""Lists and objects inside one another."""
MAX_DIGITS = 64
"""Of one integer: more than any counter, size or random state has. Python itself is quadratic in them."""
_LONG = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def read_object(path: Path, *, error: Raises, max_bytes: int = MAX_BYTES, nonfinite: bool = False) -> Fields:
    """The JSON object that a file holds. `nonfinite` admits NaN and infinities."""
    data = read_bytes(path, str(path), error=error, max_bytes=max_bytes)
    return parse_object(data, str(path), error=error, nonfinite=nonfinite)


def read_bytes(path: Path, where: str, *, error: Raises, max_bytes: int = MAX_BYTES) -> bytes:
    """A file as it is, where it is not too large."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as problem:
        raise error(f"cannot read {where}: {problem.strerror or problem}") from problem
    if len(data) > max_bytes:
        raise error(f"{where} has more than {max_bytes:,} bytes, the most that is read of such a file")
    return data


def read_lines(path: Path, *, error: Raises) -> Iterator[Fields]:
    """The JSON objects of a file with one a line; empty lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file, MAX_LINE, str(path), error=error), start=1):
                if line.strip():
                    yield parse_object(line, f"{path} line {number}", error=error)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem


def bounded_lines(file: IO[bytes], max_line: int, where: str, *, error: Raises) -> Iterator[bytes]:
    """The lines of a file with their ends; never more than `max_line` bytes of one are held."""
    number = 0
    while line := file.readline(max_line + 2):
        number += 1
        if len(line.removesuffix(b"\n").removesuffix(b"\r")) > max_line:
            raise error(f"{where} line {number} has more than {max_line:,} bytes, the most that is read of a line")
        yield line


def parse_object(data: bytes | str, where: str, *, error: Raises, nonfinite: bool = False) -> Fields:
    """The JSON object in `data`. `where` is how messages name its origin, such as a path and a line."""
    value = parse(data, where, error=error, nonfinite=nonfinite)
    if not isinstance(value, dict):
        raise error(f"{where} holds {kind_of(value)}, not a JSON object")
    return Fields(value, where, error=error)


def parse(data: bytes | str, where: str, *, error: Raises, nonfinite: bool = False) -> Any:
    """The JSON value in `data`, of any kind. The caller bounds how much `data` is."""
    try:
        raw = data.encode("utf-8") if isinstance(data, str) else data
        text = raw.decode("utf-8-sig")
    except UnicodeError as problem:
        raise error(f"{where} is not UTF-8 text") from problem
    long = _LONG.search(raw) is not None
    try:
        value = json.loads(
            text,
            parse_constant=float if nonfinite else _refuse_constant,
            parse_float=float if nonfinite else _finite,
            parse_int=_short if long else int,
            object_pairs_hook=_unique,
        )
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(value)
    except RecursionError:
        raise error(f"{where} is not valid JSON (nested more than {MAX_DEPTH} deep)") from None
    except ValueError as problem:
        raise error(f"{where} is not valid JSON ({_reason(problem)})") from problem
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key '{shown_name(name)}'")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:SHOWN]} is too large")
    return value


def _short(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits.lstrip('-')):,} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise RecursionError


def _inside(outer: dict[str, Any] | list[Any]) -> list[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    return [value for value in values if isinstance(value, dict | list)]


def _reason(problem: ValueError) -> str:
    if isinstance(problem, json.JSONDecodeError):
        return f"{problem.msg}: line {problem.lineno} column {problem.colno}"
    return str(problem)
