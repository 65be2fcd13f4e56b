"""Options stated once: a dataclass field holds an option's type, default, bounds and help; checks, and flags (`cli.flags`),
follow from it.

    @dataclass(frozen=True, kw_only=True)
    class Sampling:
        max_new_tokens: int = option(128, ge=1, metavar="N", help="stop after N new tokens")
        top_p: float = option(1.0, gt=0, le=1, help="sample from the smallest set of tokens with probability >= P")

        def __post_init__(self) -> None:
            check(self)

`check` names fields ("top_p must be > 0 and <= 1, got 2"), flags name themselves ("--top-p must be ..."). A field without
help has no flag. `bounds` gives a field's bounds under the names that pydantic takes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fathomlm.errors import OptionError, is_int, is_number, nearest

T = TypeVar("T")
_OPTION, _SECTION = "option", "section"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field says about itself beside its type and default."""

    help: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    """Bounds of the value, or of each item of a tuple."""
    choices: tuple[str, ...] = ()
    """The names that it may have; a `Literal` has its own."""
    flag: str | None = None
    """Another name than the field's (`--decode`)."""
    short: str | None = None
    """A second one (`-p`)."""
    metavar: str | None = None
    default_text: str | None = None
    """Describes what None stands for."""
    size: int | None = None
    """Takes bytes as people write them (8GB), and refuses a bare number below itself."""
    parse: Callable[[str, str], Any] | None = None
    """Reads the flag's text in its own way, given the text and the flag."""
    positional: bool = False
    """Makes an argument of it."""
    comma: bool = False
    """Splits the text of a tuple's items at commas; numbers are split anyway."""
    nargs: str | None = None
    """`+` lets a tuple's flag take several values at once."""
    const: str | None = None
    """What the flag without a value stands for."""
    finite: bool = True
    """Whether infinity is refused."""
    requires: tuple[str, ...] = ()
    """Another option of the same dataclass, without which its flag means nothing, and the values that will do where not any
    will."""
    of: str = ""
    """Where it is stated, as Class.field, if it is `like` another one."""
    also: Callable[[str, Any], object] | None = None
    """Refuses more than types and bounds do, given the field's name and its value."""
    first: Callable[[Any], None] | None = None
    """Checks the value, or each item of a tuple, against this machine before the command loads anything (`check_first`)."""

    @property
    def rule(self) -> str:
        """The bounds in words; empty where there are none."""
        if self.ge is not None and self.le is not None:
            return f"between {format_number(self.ge)} and {format_number(self.le)}"
        limits = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {format_number(limit)}" for sign, limit in limits if limit is not None)

    def holds(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def option(default: Any = MISSING, *, choices: Iterable[str] = (), repr: bool = True, **described: Any) -> Any:
    """A dataclass field with what its flag and its check need, the fields of `Option`. A default that is a function is
    called anew each time; without `repr` the value is not shown with the others."""
    return _field(default, Option(choices=tuple(choices), **described), repr)


def like(cls: type, name: str, default: Any = ..., **changes: Any) -> Any:
    """The option of another dataclass once more, under another default, help or other changes."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    stated: Option = field.metadata[_OPTION]
    owner = next(each for each in cls.__mro__ if name in inspect.get_annotations(each))
    changed = dataclasses.replace(stated, of=stated.of or f"{owner.__name__}.{name}", **changes)
    return _field(field.default if default is ... else default, changed)


def _field(default: Any, described: Option, repr: bool = True) -> Any:
    metadata = {_OPTION: described}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata, repr=repr)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=repr)
    return dataclasses.field(default=default, metadata=metadata, repr=repr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """How the options of a dataclass stand within another's."""

    title: str | None
    description: str | None
    only: tuple[str, ...]
    skip: tuple[str, ...]
    defaults: Mapping[str, Any]

    def flags(self, name: str) -> bool:
        """Whether a field has a flag."""
        return name not in self.skip and (not self.only or name in self.only)

    @property
    def unflagged(self) -> dict[str, Any]:
        """The defaults of fields without a flag."""
        return {name: value for name, value in self.defaults.items() if not self.flags(name)}


def section(
    cls: type[T],
    title: str | None = None,
    description: str | None = None,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    **defaults: Any,
) -> T:
    """A field that holds another dataclass of options: its flags form a group, under defaults of their own where given."""
    how = Section(title=title, description=description, only=tuple(only), skip=tuple(skip), defaults=defaults)
    field: T = dataclasses.field(default_factory=functools.partial(cls, **defaults), metadata={_SECTION: how})
    return field


@dataclass(frozen=True, slots=True)
class OptionField:
    """A dataclass field with its option and its type taken apart."""

    name: str
    option: Option
    kind: Any
    """Of the value, or of a tuple's items."""
    optional: bool
    many: bool
    length: int | None
    """Of a tuple that has a fixed one."""
    default: Any
    known: tuple[str, ...]
    """The names that the value may have."""

    @property
    def flag(self) -> str:
        if self.option.positional:
            return self.option.metavar or self.name.upper()
        return self.option.flag or f"--{self.name.replace('_', '-')}"


def check(instance: Any, prefix: str = "", *, inside: bool = True) -> None:
    """Refuse values that break their field's type, choices or bounds; also those of dataclasses `inside`, by dotted names,
    unless they have checked themselves."""
    cls: type = type(instance)
    for field in option_fields(cls):
        value = getattr(instance, field.name)
        if value is None and field.optional:
            continue
        name = prefix + field.name
        if field.option.also is not None:
            field.option.also(name, value)
        if not field.many:
            check_value(field, name, value)
        elif not isinstance(value, list | tuple):
            raise OptionError(f"{name} must be a list, got {value!r:.60}")
        else:
            for item in value:
                check_value(field, name, item)
    for other in dataclasses.fields(instance) if inside else ():
        inner = getattr(instance, other.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            check(inner, f"{prefix}{other.name}.")


class ChecksFirst:
    """For commands with a check of several options together that `check_first` is to run."""

    def check_first(self) -> None:
        raise NotImplementedError


def check_first(instance: Any) -> None:
    """Run the `first` checks of a command's options: a name, a path, a device. They import no tensor library, so that a slip
    is answered at once."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if _SECTION in field.metadata:
            check_first(value)
        elif _OPTION in field.metadata and (first := field.metadata[_OPTION].first) is not None and value is not None:
            for item in value if isinstance(value, tuple) else (value,):
                first(item)
    if isinstance(instance, ChecksFirst):
        instance.check_first()


def bounds(cls: type, name: str) -> dict[str, Any]:
    """The bounds of a field, for what checks them elsewhere: `ge`, `gt`, `le`, `lt`."""
    found: Option = next(field for field in dataclasses.fields(cls) if field.name == name).metadata[_OPTION]
    limits = {"ge": found.ge, "gt": found.gt, "le": found.le, "lt": found.lt}
    return {key: limit for key, limit in limits.items() if limit is not None}


def check_required(instance: Any, prefix: str = "") -> None:
    """Refuse fields that mean nothing without another one, by dotted names; also those of dataclasses inside."""
    check_required_as(instance, lambda field: prefix + field.name)
    for other in dataclasses.fields(instance):
        inner = getattr(instance, other.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            check_required(inner, f"{prefix}{other.name}.")


def check_required_as(instance: Any, named: Callable[[OptionField], str]) -> None:
    """The same of one dataclass alone, whose fields are called what `named` says. Only what differs from its default was
    given."""
    cls: type = type(instance)
    fields = {field.name: field for field in option_fields(cls)}
    for field in fields.values():
        if not field.option.requires or getattr(instance, field.name) == field.default:
            continue
        name, *known = field.option.requires
        found = getattr(instance, name)
        if found not in known if known else found == fields[name].default:
            zero = fields[name].default is None and fields[name].option.ge == 0
            which = f" {' or '.join(known)}, got {found}" if known else ", which may be 0" if zero else ""
            raise OptionError(f"{named(field)} requires {named(fields[name])}{which}")


def section_of(cls: type, name: str) -> Section | None:
    """How another dataclass stands in a field; None where the field holds none."""
    found: Section | None = cls.__dataclass_fields__[name].metadata.get(_SECTION)  # type: ignore[attr-defined]
    return found


@functools.cache
def option_fields(cls: type) -> tuple[OptionField, ...]:
    """The options of a dataclass, those inside others left out."""
    return tuple(_read_fields(cls))


def _read_fields(cls: type) -> Iterator[OptionField]:
    options = [field for field in dataclasses.fields(cls) if _OPTION in field.metadata]
    hints = typing.get_type_hints(cls) if options else {}
    for field in options:
        kind, optional = _without_none(hints[field.name])
        many, length = typing.get_origin(kind) in (tuple, list), None
        if many:
            items = typing.get_args(kind)
            kind, length = items[0], len(items) if typing.get_origin(kind) is tuple and Ellipsis not in items else None
        described: Option = field.metadata[_OPTION]
        known = described.choices
        if not known and typing.get_origin(kind) is typing.Literal:
            known = tuple(map(str, typing.get_args(kind)))
        yield OptionField(field.name, described, kind, optional, many, length, default_of(cls, field.name), known)


def default_of(cls: type, name: str) -> Any:
    """A field's default, made anew; `MISSING` where it has none."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return (members[0] if len(members) == 1 else object), len(members) < len(typing.get_args(hint))


def check_value(field: OptionField, name: str, value: Any) -> None:
    """Refuse a value, or an item of one, that breaks its field's type, choices or bounds."""
    described = field.option
    if field.known and value not in field.known:
        shown = str(value)[:60]
        raise OptionError(f"invalid {name} '{shown}'{nearest(shown, field.known)}; choose from {', '.join(field.known)}")
    right = _is_kind(field, value)
    if not right or (isinstance(value, int | float) and not described.holds(value)):
        noun = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(field.kind, "")
        rule = " ".join(part for part in ("" if right else noun, described.rule) if part)
        raise OptionError(f"{name} must be {rule}, got {value!r:.60}")


def _is_kind(field: OptionField, value: Any) -> bool:
    if field.kind is int:
        return is_int(value)
    if field.kind is float:
        infinite = isinstance(value, float) and math.isinf(value) and not field.option.finite
        return is_number(value) or infinite
    return not isinstance(field.kind, type) or field.kind is Path or isinstance(value, field.kind)


def format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
