"""What the kinds of `fathomlm study` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

LEDGER = Path("benchmarks/results/study")
WORK = Path("runs/study")


def add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ledger", metavar="DIR", type=Path, default=LEDGER, help=f"directory of STUDY.json files ({LEDGER})"
    )


def add_corpus(parser: argparse.ArgumentParser, *, required: bool) -> None:
    text = "a corpus made by `fathomlm data prepare`" + ("" if required else ", for passes over it")
    parser.add_argument("--corpus", metavar="DIR", type=Path, required=required, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def read_studies(names: list[str]) -> list[Any]:
    """The studies that were named, each once; all shipped ones where none was."""
    from fathomlm.errors import OptionError

    try:
        from fathomlm.lab.study.spec import read_study, shipped_studies
    except ImportError as error:
        raise OptionError(f"studies need the package {error.name}; pip install 'fathomlm[train]'") from error
    return [read_study(name) for name in dict.fromkeys(names or list(shipped_studies()))]


def open_place(corpus: Path | None, work: Path = WORK, device: str = "auto") -> Any:
    """Where runs are made, or only looked at."""
    from fathomlm.errors import DataError
    from fathomlm.lab.study.jobs import Place
    from fathomlm.train.data.corpus import Corpus

    if corpus is not None and not (corpus / "corpus.json").is_file():
        raise DataError(f"there is no prepared corpus at {corpus}; make it with `fathomlm data prepare` (see docs/study.md)")
    return Place(None if corpus is None else Corpus.open(corpus), work, device)


def print_rows(rows: list[list[str]]) -> None:
    """A header and rows, the first column to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [f"{row[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
