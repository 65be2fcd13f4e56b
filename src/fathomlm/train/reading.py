"""Reading a recipe: YAML from a file, `--section.field value` from the command line, types from the dataclasses.

jsonargparse converts and checks the values; what it does not do is say what a mistyped name was meant to be, so names
are looked up here first.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from fathomlm.errors import OptionError, choices
from fathomlm.train.recipe import Recipe
from fathomlm.train.recipe_checks import check_recipe


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with fields changed by `--section.field value` words; checked."""
    values = {} if path is None else read_yaml(find_recipe(path))
    return build_recipe(values, overrides)


def build_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from plain values."""
    values = _override(values, overrides)
    _check_names(values, Recipe, "")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--recipe", type=Recipe, default=Recipe())
    try:
        recipe = parser.instantiate(parser.parse_object({"recipe": values})).recipe
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise OptionError(f"recipe: {_short(str(error))}") from error
    assert isinstance(recipe, Recipe)
    check_recipe(recipe)
    return recipe


def shipped_directory() -> Path:
    """Where the recipes that come with FathomLM are: in the package when installed, in `recipes/` of a checkout."""
    packaged = Path(__file__).resolve().parent.parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped_directory().glob("*.yaml"))}


def recipe_behind(source: str) -> str | None:
    """The shipped recipe whose run leaves this model, by the name of its directory (`runs/NAME/last`)."""
    found = re.fullmatch(r"runs/([\w.-]+)/(?:last|best)/?", source)
    return found[1] if found is not None and found[1] in shipped_recipes() else None


def find_recipe(path: str | Path) -> Path:
    """A file, or the name of a recipe that is shipped."""
    given = Path(path)
    if given.is_file():
        return given
    known = shipped_recipes()
    if str(path) in known:
        return known[str(path)]
    if given.is_dir():
        raise OptionError(f"{given} is a directory; a recipe is a YAML file")
    if "/" in str(path) or given.suffix:
        raise OptionError(f"there is no recipe file {given}")
    raise OptionError(f"{choices('recipe', str(path), known)}; or give a YAML file")


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, every field, as a file that reads back equal."""
    return str(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, width=120))


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's safe loader takes the last of two equal keys and says nothing; in a recipe the first was meant as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' is there twice", key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_yaml(path: Path, what: str = "a recipe") -> dict[str, Any]:
    """The fields of a YAML file; a file that is none, or has a key twice, is refused with its line."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f"{path}, line {place.line + 1}" if place is not None else str(path)
        raise OptionError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or 'cannot be read'})") from error
    if not isinstance(values, dict):
        got = "an empty file" if values is None else "a list" if isinstance(values, list) else "a single value"
        raise OptionError(f"{path}: {what} is fields with values (name: tiny), this is {got}")
    return values


def _check_names(values: dict[str, Any], cls: type, where: str) -> None:
    """Refuse unknown keys, with the nearest known one named."""
    kinds = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in names:
            raise OptionError(f"recipe: {choices(f'field in {where[:-1]}' if where else 'field', str(key), names)}")
        section = _section(kinds[key])
        if section is not None and isinstance(value, dict):
            _check_names(value, section, f"{where}{key}.")
        elif section is not None and not (value is None and _optional(kinds[key])):
            got = "null" if value is None else repr(value)
            raise OptionError(f"recipe: {where}{key} is a section with fields of its own, got {got}")
        elif value is None and not _optional(kinds[key]):  # which jsonargparse lets pass as a field not given
            raise OptionError(f"recipe: {where}{key} must be {_plain(str(kinds[key]))}, got null")


def _override(values: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The values with those of `--a.b v` and `--a.b=v` words put in, each name looked up."""
    merged = copy.deepcopy(values)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not name:
            raise OptionError(f"cannot read '{word}'; fields of the recipe are changed with --section.field value")
        parts = name.replace("-", "_").split(".")
        kind = _check_path(parts)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise OptionError(f"--{name} needs a value")
            text = rest.pop(0)
        here = merged
        for part in parts[:-1]:
            here[part] = here[part] if isinstance(here.get(part), dict) else {}
            here = here[part]
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise OptionError(f"--{name}: cannot read '{text}'") from error
        as_typed = kind in (str, str | None) and value is not None  # --name 12 is a name, not a number
        here[parts[-1]] = text if as_typed and not isinstance(value, str) else value
    return merged


def _check_path(parts: list[str]) -> Any:
    """The type of the field that the parts of a dotted name lead to."""
    cls: type = Recipe
    kind: Any = Recipe
    for depth, part in enumerate(parts):
        names = [f.name for f in dataclasses.fields(cls)]
        if part not in names and depth == 0:
            raise OptionError(choices("option or field", f"--{part}", [f"--{name}" for name in names]))
        if part not in names:
            raise OptionError(choices(f"field in {'.'.join(parts[:depth])}", part, names))
        kind = typing.get_type_hints(cls)[part]
        section = _section(kind)
        if depth + 1 < len(parts):
            if section is None:
                if kind == dict[str, Any] | None:
                    return Any
                raise OptionError(f"{'.'.join(parts[: depth + 1])} has no fields of its own")
            cls = section
    return kind


def _section(kind: Any) -> type | None:
    """The dataclass behind a field's type, if there is one."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _optional(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


PLAIN = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "list": "a list such as [a, b]",
    "tuple": "a list such as [a, b]",
    "dict": "a section of fields",
    "NoneType": "null",
}
"""Python's types in a user's words."""


def _short(message: str) -> str:
    """jsonargparse's message in one line: the field, what it may be, what it is."""
    keys = re.findall(r'Parser key "(?:recipe\.)?([^"]+)"', message)
    single = re.search(r"Expected a (.+?)\. Got value: (.*)", message)
    unions = re.findall(r"Subtypes: \[(.+)\]", message)
    given = re.search(r"Given value: (.*)", message)
    if keys and single is not None:
        return f"{'.'.join(keys)} must be {_plain(single[1])}, got {single[2]}"
    if keys and unions and given is not None:
        return f"{'.'.join(keys)} must be {_plain(unions[-1])}, got {given[1]}"
    return " ".join(message.split())


def _plain(kinds: str) -> str:
    """Type annotations as jsonargparse prints them, one or several, in a user's words."""
    kinds = re.sub(r"\b(typing\.|(Union|Optional)\[)", "", kinds)
    found = re.findall(r"Literal\[(.+?)\]|<class '(?:\w+\.)*(\w+)'>|(\w+)\[", kinds)
    words = [
        _literal(literal) if literal else PLAIN.get(name or generic, name or generic) for literal, name, generic in found
    ]
    return " or ".join(words)


def _literal(values: str) -> str:
    return f"one of {values}" if "," in values else values
