"""What all kinds of `fathomlm eval` share: options, checks, and how they answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.exit_options import add_pack_arguments
from fathomlm.errors import OptionError, OutputError

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.outputs import Output
    from fathomlm.model.seq2seq import FathomModel


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where the model is read", "its end, unless one of these is given").add_argument
    exits = "after every recursion, every layer, both (all), or layers by number such as 4,8; the end is shown too"
    add("--exit", metavar="recursion|layer|all|N,N", help=exits)
    depth = "looped models: with at most N recursions; all tries every number of them"
    add("--max-depth", metavar="N|all", help=depth)
    add_pack_arguments(add)


def add_run_arguments(parser: argparse.ArgumentParser, batch: int, rows: str) -> None:
    add = parser.add_argument
    add("--limit", metavar="N", type=int, help=f"take the first N {rows} only (default: all)")
    add("--batch", metavar="N", type=int, default=batch, help=f"rows that run together (default: {batch})")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def check_least(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be >= 1, got {value}")


def read_outputs(args: argparse.Namespace) -> tuple[Output, ...]:
    """Where to read the model; asked of its configuration, before its weights are loaded."""
    from fathomlm.checkpoints.resolve import plan_of
    from fathomlm.lab.evaluate.outputs import choose_outputs

    return choose_outputs(plan_of(args.model, args.exits), args.exit, args.max_depth)


def check_out(out: Path | None) -> None:
    """Refuse now what could not be written later."""
    if out is None:
        return
    if out.exists():
        raise OutputError(f"{out} exists; choose another name")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"cannot write {out}: {out.parent} is no directory")


def write_lines(out: Path, records: Iterable[dict[str, Any]]) -> None:
    """JSON lines that appear whole or not at all."""
    from fathomlm.checkpoints.writing import whole_file

    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(_dump(record) + "\n")


def about(args: argparse.Namespace, model: FathomModel) -> dict[str, Any]:
    """How every record begins."""
    from fathomlm import __version__
    from fathomlm.checkpoints.resolve import describe, dtype_name

    return {
        "kind": args.kind,
        "model": args.model,
        "exit_pack": None if args.exits is None else str(args.exits),
        "plan": describe(model),
        "dtype": dtype_name(model),
        "device": args.device,
        "version": __version__,
        "batch": args.batch,
        "limit": args.limit,
    }


def print_record(record: dict[str, Any]) -> None:
    print(_dump(record))


def number(value: float) -> str:
    """Four digits behind the point; a perplexity may be beyond all counting."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3e}"


def _dump(record: dict[str, Any]) -> str:
    from fathomlm.train.report import strict

    return json.dumps(strict(record), ensure_ascii=False, allow_nan=False)
