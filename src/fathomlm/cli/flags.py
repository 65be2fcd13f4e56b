"""Flags of the options that dataclasses state (`fathomlm.options`), and the dataclasses that parsed flags describe.

add_flags(parser, Sampling)           # --max-new-tokens N, --top-p P
sampling = from_args(Sampling, args)
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from fathomlm.errors import OptionError
from fathomlm.options import (
    OptionField,
    check_required_as,
    check_value,
    default_of,
    format_number,
    option_fields,
    section_of,
)
from fathomlm.sizes import format_size, parse_size

T = TypeVar("T")
_WIDEST = 48
"""Characters of choices that stand in place of a flag's value; longer lists go behind its help."""
_MOST = 2**31 - 1
"""Of an integer flag that has no bound of its own: beyond it numbers overflow somewhere below."""
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


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
    described = {field.name: field for field in option_fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in _order(cls):
        if name in skip or (only and name not in only):
            continue
        field = described.get(name)
        inner = section_of(cls, name)
        if inner is not None:
            add_flags(
                parser, hints[name], only=inner.only, skip=inner.skip, title=inner.title, description=inner.description,
                **inner.defaults,
            )  # fmt: skip
        elif field is not None and field.option.help:
            if name in defaults:  # what is said of the class's own default is not about this one
                own = dataclasses.replace(field.option, default_text=None)
                field = dataclasses.replace(field, option=own)
            _add_flag(target, dataclasses.replace(field, default=defaults.get(name, default_of(cls, name))))


def _order(cls: type) -> list[str]:
    """Arguments first, then the flags of the class itself before those that it inherits."""
    names = [field.name for field in dataclasses.fields(cls)]
    positional = [field.name for field in option_fields(cls) if field.option.positional]
    declared = [name for each in cls.__mro__ for name in inspect.get_annotations(each) if name in names]
    return list(dict.fromkeys((*positional, *declared)))


def from_args(cls: type[T], args: argparse.Namespace, **values: Any) -> T:
    """The dataclass that parsed flags describe; `values` are fields that had none."""
    hints = typing.get_type_hints(cls)
    options = {field.name for field in option_fields(cls)}  # type: ignore[arg-type]
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            continue
        inner = section_of(cls, field.name)
        if inner is not None:
            # Fields without a flag here are the section's own, even where another flag has their name.
            unflagged = {each.name: each.default for each in option_fields(hints[field.name]) if not inner.flags(each.name)}
            values[field.name] = from_args(hints[field.name], args, **unflagged | inner.unflagged)
        elif field.name in options and hasattr(args, field.name):
            values[field.name] = getattr(args, field.name)
    found = cls(**values)
    check_required_as(found, lambda field: field.flag)
    return found


def _add_flag(target: argparse.ArgumentParser | argparse._ArgumentGroup, field: OptionField) -> None:
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


def _reader(field: OptionField) -> Callable[[str], Any]:
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
        check_value(field, field.flag, text if value is None else value)
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


def _metavar(field: OptionField) -> str | tuple[str, ...]:
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


def _help(field: OptionField) -> str:
    described, text = field.option, field.option.help
    if field.known and _metavar(field) != "{" + ",".join(field.known) + "}":
        text += f" [{', '.join(field.known)}]"
    if described.default_text is not None:
        return f"{text} (default: {described.default_text})"
    if field.default is MISSING or field.default is None or field.default in ("", (), {}):
        return text
    return f"{text} (default: {_shown(field)})"


def _shown(field: OptionField) -> str:
    if field.option.size is not None:
        return format_size(field.default)
    return ",".join(map(format_number, field.default if field.many else (field.default,)))


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
