"""What the rooms of the lab share: options, the environment that every record carries, and results as lines and tables. The
same rows of text are printed, drawn under pictures, shown in pages and written as Markdown."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import fathomlm
from fathomlm import sizes
from fathomlm.checkpoints.writing import check_target, whole_directory, whole_file
from fathomlm.cli.common import to_json
from fathomlm.cli.display import Rows
from fathomlm.options import option


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Beginnings of documents, to be completed."""

    prompts: int = option(8, ge=1, help="documents to begin from")
    prompt_tokens: int = option(32, ge=1, help="tokens of each document that are the prompt")


def check_directory(out: Path, kind: str, force: bool) -> None:
    """Refuse before any work is done what could not be written: `force` replaces an earlier analysis of this kind only."""
    check_target(out, force or _is_empty(out), **_marks(kind))


def analysis_directory(out: Path, kind: str, force: bool) -> AbstractContextManager[Path]:
    """Where an analysis is written; it appears whole or not at all."""
    return whole_directory(out, force or _is_empty(out), **_marks(kind))


def _is_empty(out: Path) -> bool:
    return out.is_dir() and not out.is_symlink() and not any(out.iterdir())


def _marks(kind: str) -> dict[str, str]:
    return {"what": f"{kind} analysis", "sign": f"{kind}.json"}


def without(value: Any, names: Collection[str]) -> Any:
    """A record without some fields, wherever they are."""
    if isinstance(value, dict):
        return {name: without(each, names) for name, each in value.items() if name not in names}
    return [without(each, names) for each in value] if isinstance(value, list) else value


def write_lines(out: Path, records: Iterable[dict[str, Any]]) -> None:
    """JSON lines that appear whole or not at all."""
    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(to_json(record) + "\n" for record in records)


def markdown(rows: Rows) -> list[str]:
    """The lines of a Markdown table; numbers to the right."""
    numeric = [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    line = "|".join("--:" if right else "---" for right in numeric)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(cells[0])} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells[1:])]


OnProgress = Callable[[int, int], object]
"""Called with how many are done, and of how many."""


def unwatched(done: int, total: int) -> None:
    """For who does not want to know."""


amount = partial(sizes.amount, digits=3)
"""A large number for people: 53.3B, 118M."""


def optional(value: float | None, form: str) -> str:
    """A number in a format; a dash where there is none."""
    return "-" if value is None else format(value, form)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:1] in "+-"


def environment(device: str = "auto") -> dict[str, Any]:
    """Without it a figure says nothing. `auto` is the GPU where there is one."""
    import torch
    import transformers

    gpu = torch.cuda.is_available() if device == "auto" else torch.device(device).type == "cuda"
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(None if device == "auto" else device) if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fathomlm": fathomlm.__version__,
    }


def free_memory() -> None:
    """Give back what the last model or run held: its graphs and weights live in cycles that only the collector finds."""
    import torch

    from fathomlm.engine.heap import collect_heap

    collect_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
