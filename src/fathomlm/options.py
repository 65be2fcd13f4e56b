"""Options stated once: a dataclass field holds an option's type, default, bounds and help; flags and checks follow from it.

    @dataclass(frozen=True, kw_only=True)
    class Sampling:
        max_new_tokens: int = option(128, ge=1, metavar="N", help="stop after N new tokens")
        top_p: float = option(1.0, gt=0, le=1, help="sample from the smallest set of tokens with probability >= P")

        def __post_init__(self) -> None:
            check(self)

    add_flags(parser, Sampling)           # --max-new-tokens N, --top-p P
    sampling = from_args(Sampling, args)

`check` names fields ("top_p must be > 0 and <= 1, got 2"), flags name themselves ("--top-p must be ..."). A field without
help has no flag. `bounds` gives a field's bounds under the names that pydantic takes.
"""

from __future__ import annotations

import argparse
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
from fathomlm.sizes import format_size, parse_size

T = TypeVar("T")
_OPTION, _SECTION = "option", "section"
_WIDEST = 48
"""Characters of choices that stand in place of a flag's value; longer lists go behind its help."""
_MOST = 2**31 - 1
"""Of an integer flag that has no bound of its own: beyond it numbers overflow somewhere below."""
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


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
            return f"between {_number(self.ge)} and {_number(self.le)}"
        limits = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {_number(limit)}" for sign, limit in limits if limit is not None)

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
class _Field:
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
    for field in _fields(cls):
        value = getattr(instance, field.name)
        if value is None and field.optional:
            continue
        name = prefix + field.name
        if field.option.also is not None:
            field.option.also(name, value)
        if not field.many:
            _check_value(field, name, value)
        elif not isinstance(value, list | tuple):
            raise OptionError(f"{name} must be a list, got {value!r:.60}")
        else:
            for item in value:
                _check_value(field, name, item)
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


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    title: str | None = None,
    description: str | None = None,
    **defaults: Any,
) -> None:
    """Add a flag for every option of a dataclass, or for `only` some, under `defaults` of the parser's own where given."""
    target = parser.add_argument_group(title, description) if title is not None else parser
    described = {field.name: field for field in _fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in _order(cls):
        if name in skip or (only and name not in only):
            continue
        field = described.get(name)
        inner = _section(cls, name)
        if inner is not None:
            add_flags(
                parser, hints[name], only=inner.only, skip=inner.skip, title=inner.title, description=inner.description,
                **inner.defaults,
            )  # fmt: skip
        elif field is not None and field.option.help:
            _add_flag(target, dataclasses.replace(field, default=defaults.get(name, _default(cls, name))))


def _order(cls: type) -> list[str]:
    """Arguments first, then the flags of the class itself before those that it inherits."""
    names = [field.name for field in dataclasses.fields(cls)]
    positional = [field.name for field in _fields(cls) if field.option.positional]
    declared = [name for each in cls.__mro__ for name in inspect.get_annotations(each) if name in names]
    return list(dict.fromkeys((*positional, *declared)))


def from_args(cls: type[T], args: argparse.Namespace, **values: Any) -> T:
    """The dataclass that parsed flags describe; `values` are fields that had none."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            continue
        inner = _section(cls, field.name)
        if inner is not None:
            # Fields without a flag here are the section's own, even where another flag has their name.
            unflagged = {each.name: each.default for each in _fields(hints[field.name]) if not inner.flags(each.name)}
            values[field.name] = from_args(hints[field.name], args, **unflagged | inner.unflagged)
        elif _OPTION in field.metadata and hasattr(args, field.name):
            values[field.name] = getattr(args, field.name)
    found = cls(**values)
    _check_required(found, lambda field: field.flag)
    return found


def check_required(instance: Any, prefix: str = "") -> None:
    """Refuse fields that mean nothing without another one, by dotted names; also those of dataclasses inside."""
    _check_required(instance, lambda field: prefix + field.name)
    for other in dataclasses.fields(instance):
        inner = getattr(instance, other.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            check_required(inner, f"{prefix}{other.name}.")


def _check_required(instance: Any, named: Callable[[_Field], str]) -> None:
    """Only what differs from its default was given."""
    cls: type = type(instance)
    fields = {field.name: field for field in _fields(cls)}
    for field in fields.values():
        if not field.option.requires or getattr(instance, field.name) == field.default:
            continue
        name, *known = field.option.requires
        found = getattr(instance, name)
        if found not in known if known else found == fields[name].default:
            zero = fields[name].default is None and fields[name].option.ge == 0
            which = f" {' or '.join(known)}, got {found}" if known else ", which may be 0" if zero else ""
            raise OptionError(f"{named(field)} requires {named(fields[name])}{which}")


def _section(cls: type, name: str) -> Section | None:
    found: Section | None = cls.__dataclass_fields__[name].metadata.get(_SECTION)  # type: ignore[attr-defined]
    return found


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    return tuple(_read_fields(cls))


def _read_fields(cls: type) -> Iterator[_Field]:
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
        yield _Field(field.name, described, kind, optional, many, length, _default(cls, field.name), known)


def _default(cls: type, name: str) -> Any:
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return (members[0] if len(members) == 1 else object), len(members) < len(typing.get_args(hint))


def _check_value(field: _Field, name: str, value: Any) -> None:
    described = field.option
    if field.known and value not in field.known:
        shown = str(value)[:60]
        raise OptionError(f"invalid {name} '{shown}'{nearest(shown, field.known)}; choose from {', '.join(field.known)}")
    right = _is_kind(field, value)
    if not right or (isinstance(value, int | float) and not described.holds(value)):
        noun = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(field.kind, "")
        rule = " ".join(part for part in ("" if right else noun, described.rule) if part)
        raise OptionError(f"{name} must be {rule}, got {value!r:.60}")


def _is_kind(field: _Field, value: Any) -> bool:
    if field.kind is int:
        return is_int(value)
    if field.kind is float:
        infinite = isinstance(value, float) and math.isinf(value) and not field.option.finite
        return is_number(value) or infinite
    return not isinstance(field.kind, type) or field.kind is Path or isinstance(value, field.kind)


def _add_flag(target: argparse.ArgumentParser | argparse._ArgumentGroup, field: _Field) -> None:
    described, names = field.option, [field.flag]
    if described.positional:
        names = [field.name]
    elif described.short is not None:
        names.insert(0, described.short)
    if field.kind is bool:
        action: Any = argparse.BooleanOptionalAction if field.default or field.default is None else "store_true"
        target.add_argument(*names, dest=field.name, action=action, default=field.default, help=_escaped(described.help))
        return
    given: dict[str, Any] = {"type": _reader(field), "metavar": _metavar(field), "help": _escaped(_help(field))}
    if field.default is not MISSING:
        given["default"] = field.default
    if field.many:
        given["action"] = _Collect
    if described.positional:
        nargs = "+" if field.many else None
        given["nargs"] = nargs if field.default is MISSING else "*" if field.many else "?"
    else:
        given |= {"dest": field.name, "required": field.default is MISSING}
        if field.length is not None or described.nargs is not None:
            given["nargs"] = described.nargs if field.length is None else field.length
        if described.const is not None:
            given |= {"nargs": "?", "const": described.const}
    target.add_argument(*names, **given)


class _Collect(argparse.Action):
    """The items of a flag that may be given more than once, as one tuple in place of its default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given = values if isinstance(values, list) else [values]
        before = getattr(namespace, self.dest, None)
        earlier = () if before is None or before is self.default else before
        items = () if values is self.default else tuple(item for each in given for item in each)
        setattr(namespace, self.dest, self.default if values is self.default else (*earlier, *items))


def _reader(field: _Field) -> Callable[[str], Any]:
    """What turns a flag's text into its value, and refuses what breaks the field's rule."""
    described = field.option

    def one(text: str) -> Any:
        path = described.positional or described.first is not None or field.kind is Path
        if path and not text and field.default != "":  # an unset variable; as a path it would be `.`
            raise OptionError(f"{field.flag} must not be empty")
        if described.parse is not None:
            return described.parse(text, field.flag)
        if described.size is not None:
            return parse_size(text, field.flag, least=described.size)
        value = _converted(field.kind, text)
        _check_value(field, field.flag, text if value is None else value)
        if field.kind is int and value > _MOST and (described.le, described.lt) == (None, None):
            raise OptionError(f"{field.flag} must be <= {_MOST}, got {value}")
        return value

    def read(text: str) -> Any:
        if not field.many:
            return one(text)
        split = described.comma or field.kind in (int, float)
        return tuple(one(word.strip()) for word in text.split(",")) if split else (one(text),)

    return read


def _converted(kind: Any, text: str) -> Any:
    """The text as its kind; None where it is none of it."""
    try:
        return kind(text) if kind in (int, float, Path) else text
    except ValueError:
        return None


def _metavar(field: _Field) -> str | tuple[str, ...]:
    described = field.option
    if described.metavar is not None:
        return tuple(described.metavar.split()) if field.length is not None else described.metavar
    shown = "{" + ",".join(field.known) + "}"
    if field.known and len(shown) <= _WIDEST:
        return shown
    if described.positional:
        return field.name.upper()
    if described.size is not None:
        return "SIZE"
    return "NAME" if field.known else _METAVARS.get(field.kind, "VALUE")


def _help(field: _Field) -> str:
    described, text = field.option, field.option.help
    if field.known and _metavar(field) != "{" + ",".join(field.known) + "}":
        text += f" [{', '.join(field.known)}]"
    if described.default_text is not None:
        return f"{text} (default: {described.default_text})"
    if field.default is MISSING or field.default is None or field.default in ("", (), {}):
        return text
    return f"{text} (default: {_shown(field)})"


def _shown(field: _Field) -> str:
    if field.option.size is not None:
        return format_size(field.default)
    return ",".join(map(_number, field.default if field.many else (field.default,)))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
