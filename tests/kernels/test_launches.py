"""Launches name what kernels take, read from the source: machines without a GPU would not see a name that is gone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fathomlm
from fathomlm.kernels import triton_here

SOURCES = sorted(Path(fathomlm.__file__).parent.rglob("*.py"))
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg", "grid", "warmup"}


def jitted(tree: ast.Module) -> dict[str, ast.arguments]:
    return {
        node.name: node.args
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }


def launches(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Calls of the form `kernel[grid](...)`, with the kernel's last name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    return [(ast.unparse(call.func.value).split(".")[-1], call) for call in calls if isinstance(call.func, ast.Subscript)]


def wrong_names(call: ast.Call, takes: ast.arguments) -> set[str]:
    names = {argument.arg for argument in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)}
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None} - names - LAUNCH_OPTIONS


def test_every_keyword_of_a_launch_is_its_kernels() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    named = [(name, takes) for tree in trees.values() for name, takes in jitted(tree).items()]
    kernels = dict(named)
    assert len(kernels) == len(named), "two kernels have one name"
    found = [(path, name, call) for path, tree in trees.items() for name, call in launches(tree) if name in kernels]
    assert len(found) >= 20, "the kernels and their launches were not found"
    wrong = [
        f"{path.name}:{call.lineno}: {name} has no {', '.join(sorted(missing))}"
        for path, name, call in found
        if (missing := wrong_names(call, kernels[name]))
    ]
    assert not wrong


def test_a_name_that_is_gone_is_found() -> None:
    tree = ast.parse("@triton.jit\ndef k(a, N: tl.constexpr): ...\nk[(1,)](a, M=2, num_warps=4)")
    ((name, call),) = launches(tree)
    assert wrong_names(call, jitted(tree)[name]) == {"M"}


def test_more_rows_start_early_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "_starts_early", lambda: True)
    monkeypatch.setattr(triton_here, "EARLY_ROWS", 1)

    def early() -> list[int]:
        return [rows for rows in (1, 2, 16, 17) if triton_here.early_launch(rows)["EARLY"]]

    assert early() == [1]
    with triton_here.launching_early(16):
        assert early() == [1, 2, 16]
        with triton_here.launching_early(0):
            assert early() == [1]
        assert early() == [1, 2, 16]
    assert early() == [1]
    monkeypatch.setattr(triton_here, "_starts_early", lambda: False)
    with triton_here.launching_early(16):
        assert early() == []
