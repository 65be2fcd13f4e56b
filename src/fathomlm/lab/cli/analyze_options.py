"""What all kinds of `fathomlm analyze` share: their options, and how they answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.sampling_options import add_model_arguments
from fathomlm.cli.shown import model_name
from fathomlm.errors import OptionError

if TYPE_CHECKING:
    from fathomlm.lab.analyze.report import About, RunsAbout
    from fathomlm.model.hub import FathomForCausalLM

SOURCES = "text (.txt, .md), JSON lines (.jsonl, also .gz, .xz, .zst), or a prepared corpus, whose validation part is read"


def add_shared_arguments(parser: argparse.ArgumentParser, kind: str, longest: int = 1024) -> None:
    """`longest` is the row length where none is asked for and the model could read more."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--column", metavar="NAME", default="text", help="where the text is in JSON lines (text)")
    add("--context", metavar="N", type=int, help=f"tokens of a row (what the model reads, at most {longest})")
    add("--out", metavar="DIR", type=Path, help=f"directory to write (analysis/{kind}-MODEL)")
    add("--force", action="store_true", help=f"replace DIR if it is a {kind} analysis")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def out_directory(args: argparse.Namespace, kind: str) -> Path:
    """Where to write; refused now if it could not be written later."""
    from fathomlm.lab.analyze.report import check_directory
    from fathomlm.lab.drawing import check_matplotlib

    check_matplotlib()
    out: Path = args.out or Path("analysis") / f"{kind}-{model_name(args.model)}"
    check_directory(out, kind, args.force)
    return out


def check_least(option: str, value: int, least: int = 1) -> None:
    if value < least:
        raise OptionError(f"--{option} must be >= {least}, got {value}")


def about(args: argparse.Namespace, model: FathomForCausalLM, data: Sequence[str]) -> About:
    from fathomlm import __version__
    from fathomlm.checkpoints.resolve import describe, dtype_name
    from fathomlm.lab.analyze.report import About

    return About(
        model=args.model,
        name=model_name(args.model),
        plan=describe(model),
        dtype=dtype_name(model),
        device=args.device,
        data=list(data),
        version=__version__,
    )


def answer(
    args: argparse.Namespace,
    shown: About | RunsAbout,
    summary: dict[str, Any],
    tables: Sequence[list[list[str]]],
    files: Sequence[Path],
) -> None:
    """The end of every kind: a table or a record, and where the rest is."""
    if args.json:
        import dataclasses

        from fathomlm.train.report import strict

        record = {"kind": args.kind, **dataclasses.asdict(shown), **summary, "files": [str(file) for file in files]}
        print(json.dumps(strict(record), ensure_ascii=False, allow_nan=False))
        return
    from fathomlm.lab.tables import print_table

    for table in tables:
        print_table(table)
    page = next(file for file in files if file.name == "index.html")
    print(f"{page} shows all of it; numbers and pictures stand beside it")
