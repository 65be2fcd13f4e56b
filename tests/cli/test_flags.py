"""One flag, one statement: a flag that several commands have comes from one field of one dataclass, by inheritance, as a
section or with `like`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from fathomlm.cli.main import COMMANDS, Command

OWN = {
    "--budget": "a part of a model's bytes, or FLOPs",
    "--context": "what is as long as it differs: a window, a row, a sequence",
    "--data": "what is read: text, tasks, prompts with references",
    "--max-tokens": "of a corpus, a completion, an answer",
    "--metric": "of completions, or a curve",
    "--model": "one more to serve, or the judge",
    "--out": "what a command writes",
    "--prompt": "text, or a template",
    "--quantize": "how weights are stored, or computed with",
    "--sequences": "from text, or of the thesis' tables",
    "--source": "of prompts, in files of two kinds",
    "--split": "of a corpus, or whether a run may be split",
    "--tasks": "by name, or their directory",
    "--timeout": "of a server's requests, or of the judge's",
    "--tokens": "of what there is",
}
"""Flags whose meaning is their command's."""


def commands(table: typing.Mapping[str, Command] = COMMANDS) -> Iterator[type]:
    for command in table.values():
        if command.kinds:
            yield from commands(command.kinds)
        else:
            module, _, name = command.options.partition(":")
            yield getattr(importlib.import_module(f"fathomlm.{module}"), name)


def stated(cls: type, flags: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, str]]:
    """The flags of a dataclass, and where each is stated. `flags` says which fields have one here."""
    hints = typing.get_type_hints(cls)
    for field in (field for field in dataclasses.fields(cls) if flags(field.name)):
        if (section := field.metadata.get("section")) is not None:
            yield from stated(hints[field.name], section.flags)
        elif (option := field.metadata.get("option")) is not None and option.help and not option.positional:
            owner = next(each for each in cls.__mro__ if field.name in inspect.get_annotations(each))
            yield option.flag or f"--{field.name.replace('_', '-')}", option.of or f"{owner.__name__}.{field.name}"


@pytest.fixture(scope="module")
def places() -> dict[str, set[str]]:
    found = defaultdict(set)
    for cls in commands():
        for flag, place in stated(cls):
            found[flag].add(place)
    return found


def test_a_flag_of_several_commands_is_stated_once(places: dict[str, set[str]]) -> None:
    assert {flag: where for flag, where in places.items() if len(where) > 1 and flag not in OWN} == {}


def test_no_flag_is_excused_that_is_stated_once(places: dict[str, set[str]]) -> None:
    assert [flag for flag in OWN if len(places[flag]) < 2] == []


@pytest.mark.parametrize("flag", ["--batch-size", "--decode", "--exit", "--max-new-tokens", "--memory", "--threshold"])
def test_what_once_had_two_meanings(flag: str, places: dict[str, set[str]]) -> None:
    assert len(places[flag]) == 1
