"""docs/tour.ipynb, run: every code cell in order in one process, as a kernel would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BOOK = json.loads((Path(__file__).parents[1] / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"]
KERNEL = """
import json, sys

if __name__ == "__main__":  # tokenizing processes import this file too
    import torch

    torch.set_num_threads(1)
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


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(CELLS))
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, "kernel.py", "cells.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("CELL")] == [
        f"CELL {number}" for number in range(1, len(CELLS) + 1)
    ]
    assert "depths: (" in done.stdout
    assert "rank 64: " in done.stdout
    assert "FathomForCausalLM" in done.stdout
    assert "LlamaForCausalLM" in done.stdout
