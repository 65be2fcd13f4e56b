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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, overload

from fathomlm.errors import FathomError, choices, is_int, is_number

Raises = type[FathomError]
MAX_BYTES = 16 << 20
"""Of a whole file. A configuration has kilobytes; the index of the largest public checkpoint has 9 MB."""
MAX_LINE = 16 << 20
"""Of one line of JSON lines."""
MAX_DEPTH = 64
"""Lists and objects inside one another."""
MAX_DIGITS = 64
"""Of one integer: more than any counter, size or random state has. Python itself is quadratic in them."""
_LONG = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_SHOWN = 60


class _Required:
    """Stands for a default where there is none."""


REQUIRED = _Required()


def read_object(
    path: Path, *, error: Raises, max_bytes: int = MAX_BYTES, nonfinite: bool = False, what: str | None = None
) -> Fields:
    """The JSON object that a file holds. `nonfinite` admits NaN and infinities; `what` names the file in messages."""
    where = what or str(path)
    return parse_object(read_bytes(path, where, error=error, max_bytes=max_bytes), where, error=error, nonfinite=nonfinite)


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


def read_lines(
    path: Path, *, error: Raises, max_line: int = MAX_LINE, nonfinite: bool = False, unfinished: bool = False
) -> Iterator[tuple[int, Fields]]:
    """The JSON objects of a file with one a line, each with its line's number from 1; empty lines are passed over.

    `unfinished` passes over a last line that has no end and does not parse: its writer was stopped within it.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file, max_line, str(path), error=error), start=1):
                if not line.strip():
                    continue
                try:
                    found = parse_object(line, f"{path} line {number}", error=error, nonfinite=nonfinite)
                except error:
                    if unfinished and not line.endswith(b"\n"):
                        return
                    raise
                yield number, found
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
        raise error(f"{where} holds {_kind(value)}, not a JSON object")
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


class Fields:
    """The fields of a JSON object, each read as the type that its reader expects.

    A field that is absent or null has its default; without a default it is an error. `default=None` makes it optional.
    """

    __slots__ = ("_error", "_prefix", "values", "where")

    def __init__(self, values: Mapping[str, Any], where: str, *, error: Raises, prefix: str = "") -> None:
        self.values = values
        """As they were parsed."""
        self.where = where
        """The file, and the line where it has several objects."""
        self._error = error
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def raw(self, name: str, default: Any = None) -> Any:
        """A field as it was parsed; null is the default."""
        value: Any = self.values.get(name)
        return default if value is None else value

    def wrong(self, name: str, rule: str) -> FathomError:
        """The error for a field that breaks a rule, to be raised by a caller who knows more rules than are here."""
        if name not in self.values:
            return self._error(f"{self.where} lacks {self._prefix}{name}, which must be {rule}")
        return self._error(f"{self.where}: {self._prefix}{name} must be {rule}, got {shown(self.values[name])}")

    def only(self, names: Collection[str]) -> None:
        """Refuse fields of any other name."""
        for name in self.values:
            if name not in names:
                inside = f" {self._prefix.rstrip('.')}" if self._prefix else ""
                raise self._error(f"{self.where}:{inside} {choices('field', shown_name(name), names)}")

    @overload
    def integer(self, name: str, *, at_least: int | None = ..., at_most: int | None = ...) -> int: ...
    @overload
    def integer(self, name: str, *, at_least: int | None = ..., at_most: int | None = ..., default: int) -> int: ...
    @overload
    def integer(self, name: str, *, at_least: int | None = ..., at_most: int | None = ..., default: None) -> int | None: ...
    def integer(
        self,
        name: str,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        default: int | _Required | None = REQUIRED,
    ) -> int | None:
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not is_int(value) or not _within(value, at_least, at_most):
            raise self.wrong(name, _range("an integer", at_least, at_most))
        return int(value)

    @overload
    def number(self, name: str, *, at_least: float | None = ..., at_most: float | None = ...) -> float: ...
    @overload
    def number(self, name: str, *, at_least: float | None = ..., at_most: float | None = ..., default: float) -> float: ...
    @overload
    def number(
        self, name: str, *, at_least: float | None = ..., at_most: float | None = ..., default: None
    ) -> float | None: ...
    def number(
        self,
        name: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        default: float | _Required | None = REQUIRED,
    ) -> float | None:
        """A finite number."""
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not is_number(value) or not _within(value, at_least, at_most):
            raise self.wrong(name, _range("a number", at_least, at_most))
        return float(value)

    @overload
    def text(self, name: str, *, known: Collection[str] = ...) -> str: ...
    @overload
    def text(self, name: str, *, known: Collection[str] = ..., default: str) -> str: ...
    @overload
    def text(self, name: str, *, known: Collection[str] = ..., default: None) -> str | None: ...
    def text(self, name: str, *, known: Collection[str] = (), default: str | _Required | None = REQUIRED) -> str | None:
        """A string; one of `known` where they are given."""
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not _is_text(value):
            raise self.wrong(name, "a string")
        if known and value not in known:
            raise self._error(f"{self.where}: {choices(f'{self._prefix}{name}', shown_name(value), known)}")
        return str(value)

    @overload
    def flag(self, name: str) -> bool: ...
    @overload
    def flag(self, name: str, *, default: bool) -> bool: ...
    @overload
    def flag(self, name: str, *, default: None) -> bool | None: ...
    def flag(self, name: str, *, default: bool | _Required | None = REQUIRED) -> bool | None:
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def items(self, name: str, *, at_most: int | None = None, default: list[Any] | _Required = REQUIRED) -> list[Any]:
        """A list of values of any kind."""
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if at_most is not None and len(value) > at_most:
            raise self._error(f"{self.where}: {self._prefix}{name} has {len(value):,} items; at most {at_most:,} are read")
        return value

    def integers(
        self,
        name: str,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        default: list[int] | _Required = REQUIRED,
    ) -> list[int]:
        """A list of integers, each within the bounds."""
        values = self.items(name, default=default)
        for value in values:
            if not is_int(value) or not _within(value, at_least, at_most):
                raise self._error(
                    f"{self.where}: {self._prefix}{name} must be a list of {_range('integers', at_least, at_most)}, "
                    f"and holds {shown(value)}"
                )
        return values

    def texts(self, name: str, *, default: list[str] | _Required = REQUIRED) -> list[str]:
        """A list of strings."""
        values = self.items(name, default=default)
        for value in values:
            if not _is_text(value):
                raise self._error(f"{self.where}: {self._prefix}{name} must be a list of strings, and holds {shown(value)}")
        return values

    @overload
    def record(self, name: str) -> Fields: ...
    @overload
    def record(self, name: str, *, default: None) -> Fields | None: ...
    def record(self, name: str, *, default: _Required | None = REQUIRED) -> Fields | None:
        """The object within this one."""
        value: Any = self.values.get(name)
        if value is None and not isinstance(default, _Required):
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.where, error=self._error, prefix=f"{self._prefix}{name}.")

    def records(self, name: str, *, default: list[Any] | _Required = REQUIRED) -> list[Fields]:
        """A list of objects."""
        found = []
        for at, value in enumerate(self.items(name, default=default)):
            if not isinstance(value, dict):
                raise self._error(f"{self.where}: {self._prefix}{name} must be a list of objects, and holds {shown(value)}")
            found.append(Fields(value, self.where, error=self._error, prefix=f"{self._prefix}{name}[{at}]."))
        return found


def shown(value: object) -> str:
    """A value in a message: short, on one line, whatever it is."""
    match value:
        case dict() | list():
            return f"{_kind(value)} of {len(value):,}"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() if value.bit_length() > 256:
            return "an integer of many digits"
        case str():
            return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    return repr(value)


def shown_name(name: str) -> str:
    """The same of a name that stands between quotation marks."""
    return shown(name)[1:-1]


def _kind(value: object) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _is_text(value: object) -> bool:
    """A string that can be written again; half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _within(value: Any, at_least: float | None, at_most: float | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _range(kind: str, at_least: float | None, at_most: float | None) -> str:
    if at_least is not None and at_most is not None:
        return f"{kind} from {at_least} to {at_most}"
    if at_least is not None:
        return f"{kind} >= {at_least}"
    return kind if at_most is None else f"{kind} <= {at_most}"


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
        raise ValueError(f"the number {digits[:_SHOWN]} is too large")
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
