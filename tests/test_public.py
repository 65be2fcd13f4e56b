"""The names that users import, and how files import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fathomlm

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
NOT_AT_THE_TOP = {"train"}
"""Functions with the name of a package of ours."""


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    for name in fathomlm.__all__:
        assert getattr(fathomlm, name) is not None


def test_type_checkers_are_told_the_same() -> None:
    (told,) = (node for node in ast.parse((SOURCE / "fathomlm/__init__.py").read_text()).body if isinstance(node, ast.If))
    places = {a.name: node.module for node in told.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert places == fathomlm._PUBLIC


def test_docs_import_what_is_public_from_the_top() -> None:
    """extending.md is about files; the lab has no public names."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for module, names in re.findall(r"^from (fathomlm[\w.]*) import ([\w, ]+)$", page.read_text(), flags=re.M):
            if page.name == "extending.md" or module.startswith("fathomlm.lab"):
                continue
            for name in re.split(r", *", names):
                assert name in NOT_AT_THE_TOP or module == "fathomlm", f"{page.name}: from {module} import {name}"


def test_errors_are_public() -> None:
    from fathomlm import errors

    kinds = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert "OptionError" in kinds
    assert kinds <= set(fathomlm.__all__)


def test_no_two_files_import_each_other() -> None:
    """Not for types either, and not by a longer way."""
    files = {_module(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: set(_imports(path, files)) - {name} for name, path in files.items()}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    in_cycles = {name: sorted(imported & graph.keys()) for name, imported in graph.items()}
    assert not in_cycles


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(_module(path))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, files: dict[str, Path]) -> Iterator[str]:
    """Of a whole file; those in functions are left out, where they are late on purpose. So is the list of public names."""
    tree = ast.parse(path.read_text())
    late = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in late for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in inside and _module(path) != "fathomlm":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in files else node.module
