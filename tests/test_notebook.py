"""docs/tour.ipynb, run: every code cell in order in one process, as a kernel would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked

BOOK = json.loads((Path(__file__).parents[1] / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"]
KERNEL = """
import json, sys

names = {}
for number, cell in enumerate(json.load(open(sys.argv[1])), start=1):
    print("CELL", number, flush=True)
    exec(compile(cell, f"cell {number}", "exec"), names)
"""


def test_the_notebook_is_one() -> None:
    assert (BOOK["nbformat"], BOOK["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert len({cell["id"] for cell in BOOK["cells"]}) == len(BOOK["cells"])
    assert all(cell["outputs"] for cell in BOOK["cells"] if cell["cell_type"] == "code"), "it is kept with what it prints"
    assert not any(line.startswith(("%", "!")) for cell in CELLS for line in cell.splitlines()), "plain Python runs anywhere"


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_python: Callable[..., Forked]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cells.json").write_text(json.dumps(CELLS))
    kernel = start_python(KERNEL, "cells.json")
    printed, said = kernel.communicate()
    assert kernel.returncode == 0, said[-3000:]
    assert [line for line in printed.splitlines() if line.startswith("CELL")] == [
        f"CELL {number}" for number in range(1, len(CELLS) + 1)
    ]
    assert "depths: (" in printed
    assert "rank 64: " in printed
    assert "FathomForCausalLM" in printed
    assert "LlamaForCausalLM" in printed
