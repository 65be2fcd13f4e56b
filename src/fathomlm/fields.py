"""The fields of a record that came from somewhere else, each read as the type that its reader expects: one at a time, or all
of them as a dataclass.

    layers = config.integer("num_hidden_layers", at_least=1, at_most=4096)
    plan = record.build(DepthPlan)

Whatever is wrong is raised as the caller's error type, in one line that names the file, the field, the rule and the value.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from fathomlm.errors import FathomError, OptionError, choices, is_int, is_number, nearest

D = TypeVar("D")
T = TypeVar("T")
Raises = type[FathomError]
REQUIRED: Any = object()
"""Stands for a default where there is none."""
NOUNS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
SECTION = "a section of fields"
SHOWN = 60
"""Characters of a value in a message."""


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

    def wrong(self, name: str, rule: str, value: object = REQUIRED) -> FathomError:
        """The error for a field that breaks a rule, to be raised by a caller who knows more rules than are here. `value` is
        an item of it that does, and `name` then its place, such as windows[2]."""
        if value is REQUIRED and name not in self.values:
            near = nearest(name, map(str, self.values))
            return self._error(f"{self.where} is missing {self._prefix}{name}{near}, which must be {rule}")
        got = shown(self.values[name] if value is REQUIRED else value)
        return self._error(f"{self.where}: {self._prefix}{name} must be {rule}, got {got}")

    def _given(self, name: str, default: Any, fits: Callable[[Any], bool], rule: str) -> Any:
        """A field that obeys a rule."""
        value: Any = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if not fits(value):
            raise self.wrong(name, rule)
        return value

    def integer(
        self, name: str, *, at_least: int | None = None, at_most: int | None = None, default: D = REQUIRED
    ) -> int | D:
        within = partial(_within, at_least=at_least, at_most=at_most)
        rule = _range("an integer", at_least, at_most)
        return self._given(name, default, lambda value: is_int(value) and within(value), rule)  # type: ignore[no-any-return]

    def number(self, name: str, *, at_least: float | None = None, default: D = REQUIRED) -> float | D:
        """A finite number."""
        within, rule = partial(_within, at_least=at_least, at_most=None), _range("a number", at_least, None)
        found: Any = self._given(name, default, lambda value: is_number(value) and within(value), rule)
        return float(found) if is_int(found) else found

    def text(self, name: str, *, known: Collection[str] = (), default: D = REQUIRED) -> str | D:
        """A string; one of `known` where they are given."""
        value: Any = self._given(name, default, _is_text, "a string")
        if known and self.raw(name) is not None and value not in known:
            raise self._error(f"{self.where}: {choices(f'{self._prefix}{name}', shown_name(value), known)}")
        return value  # type: ignore[no-any-return]

    def flag(self, name: str, *, default: D = REQUIRED) -> bool | D:
        return self._given(name, default, lambda value: isinstance(value, bool), "true or false")  # type: ignore[no-any-return]

    def record(self, name: str, *, default: D = REQUIRED) -> Fields | D:
        """The object within this one."""
        value: Any = self._given(name, default, lambda value: isinstance(value, dict), "an object")
        return self._part(name, value) if isinstance(value, dict) else value

    def _part(self, name: str, values: Mapping[str, Any]) -> Fields:
        return Fields(values, self.where, error=self._error, prefix=f"{self._prefix}{name}.")

    def _all(self, name: str, default: list[Any], fits: Callable[[Any], bool], rule: str) -> list[Any]:
        """A list whose items obey a rule."""
        values: list[Any] = self._given(name, default, lambda value: isinstance(value, list), "a list")
        for value in values:
            if not fits(value):
                raise self._error(f"{self.where}: {self._prefix}{name} must be a list of {rule}, and holds {shown(value)}")
        return values

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers."""
        return [float(value) for value in self._all(name, REQUIRED, is_number, "numbers")]

    def integers(self, name: str, *, at_least: int | None = None, at_most: int | None = None) -> list[int]:
        """A list of integers, each within the bounds."""
        within = partial(_within, at_least=at_least, at_most=at_most)
        rule = _range("integers", at_least, at_most)
        return self._all(name, REQUIRED, lambda value: is_int(value) and within(value), rule)

    def texts(self, name: str, *, default: list[str] = REQUIRED) -> list[str]:
        """A list of strings."""
        return self._all(name, default, _is_text, "strings")

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """The same record with some other values."""
        return Fields({**self.values, **values}, self.where, error=self._error, prefix=self._prefix)

    def build(self, cls: type[T], *, texts: bool = False, whole: bool = False) -> T:
        """A dataclass from fields of the same names, each as its annotation says: what is missing has its default (`whole`:
        nothing may be missing), any other name is refused, and so is what the dataclass itself refuses. `texts` also takes
        numbers that are written as strings, as YAML reads 3e-4."""
        hints = _hints(cls)  # type: ignore[arg-type]
        for name in self.values:
            if name not in hints:
                inside = f" in {self._prefix[:-1]}" if self._prefix else ""
                raise self._error(f"{self.where}: {choices(f'field{inside}', shown_name(str(name)), hints)}")
        found, missing = {}, []
        for field in (field for field in dataclasses.fields(cls) if field.init):  # type: ignore[arg-type]
            if field.name in self.values:
                found[field.name] = self._as(hints[field.name], field.name, self.values[field.name], texts, whole)
            elif whole or field.default is field.default_factory is dataclasses.MISSING:
                missing.append(field.name)
        if len(missing) == 1:
            raise self.wrong(missing[0], _rule(hints[missing[0]]))
        if missing:
            raise self._error(f"{self.where} is missing {', '.join(self._prefix + name for name in missing)}")
        try:
            return cls(**found)
        except OptionError as problem:
            if issubclass(OptionError, self._error):
                raise
            # Most rules begin with the name of their field, which the prefix completes.
            begins = str(problem).split(" ")[0] in hints
            inside = self._prefix if begins or not self._prefix else f"{self._prefix[:-1]}: "
            raise self._error(f"{self.where}: {inside}{problem}") from None

    def _as(self, kind: Any, name: str, value: Any, texts: bool, whole: bool) -> Any:
        """A value as an annotation says, the first that fits of several."""
        options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        for option in options:
            origin, inner = typing.get_origin(option), typing.get_args(option)
            if isinstance(value, dict) and (origin in (dict, Mapping) or dataclasses.is_dataclass(option)):
                part = self._part(name, value)
                if origin is None:
                    return part.build(option, texts=texts, whole=whole)
                return {key: part._as(inner[1], key, each, texts, whole) for key, each in value.items()}
            if origin in (list, tuple) and isinstance(value, list):
                kinds = inner[:1] * len(value) if origin is list or Ellipsis in inner else inner
                if len(kinds) == len(value):
                    items = enumerate(zip(kinds, value, strict=True))
                    return origin(self._as(own, f"{name}[{n}]", each, texts, whole) for n, (own, each) in items)
            if _fits(option, value):
                return float(value) if option is float else value
            if texts and option in (int, float) and (number := _number(value, option)) is not None:
                return number
        names = [each for each in options if typing.get_origin(each) is typing.Literal]
        known = [str(each) for literal in names for each in typing.get_args(literal)]
        near = nearest(value, known) if isinstance(value, str) else ""
        raise self._error(f"{self.wrong(name, _rule(kind), value)}{near}")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _fits(kind: Any, value: object) -> bool:
    """Whether a value is of a plain type, or one of a literal's."""
    if typing.get_origin(kind) is typing.Literal:
        return any(value == each and type(value) is type(each) for each in typing.get_args(kind))
    if kind in (int, float):
        return is_int(value) or (kind is float and isinstance(value, float))
    return kind is Any or (_is_text(value) if kind is str else isinstance(kind, type) and isinstance(value, kind))


def _number(text: object, kind: type[int] | type[float]) -> float | None:
    try:
        return kind(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _rule(kind: Any) -> str:
    """An annotation in a user's words."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    words = []
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is typing.Literal:
            names = ", ".join(map(repr, typing.get_args(option)))
            words.append(f"one of {names}" if "," in names else names)
        elif origin is dict or dataclasses.is_dataclass(option):
            words.append(SECTION)
        else:
            words.append("a list such as [a, b]" if origin in (list, tuple) else NOUNS.get(origin, str(origin)))
    return " or ".join(words)


def shown(value: object) -> str:
    """A value in a message: short, on one line, whatever it is."""
    match value:
        case dict() | list():
            return f"{kind_of(value)} of {len(value):,}"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() if value.bit_length() > 256:
            return "an integer of many digits"
        case str():
            return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
    return repr(value)


def shown_name(name: str) -> str:
    """The same of a name that stands between quotation marks."""
    return shown(name)[1:-1]


def kind_of(value: object) -> str:
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
