"""`fathomlm eval [KIND] MODEL`: how good a model is. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from fathomlm.cli.kinds import add_kinds, run_kind

HELP = "measure how good a model is"
DESCRIPTION = (
    "Measures how good MODEL is: at answering (tasks), at predicting text (ppl), at writing texts (generate), and what "
    "that costs at many depths (frontier). What was written can be judged by another model (judge). The word tasks may be "
    "left out: `fathomlm eval MODEL --tasks hellaswag`. The result is a table, or with --json one JSON object; progress "
    "goes to standard error."
)
EPILOG = "`fathomlm eval KIND --help` lists the options of a kind."
DEFAULT_KIND = "tasks"
KINDS = {kind: f"fathomlm.lab.cli.eval_{kind}" for kind in ("tasks", "ppl", "generate", "frontier", "judge")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] [KIND] MODEL ..."
    parser.epilog = EPILOG
    add_kinds(parser, KINDS, prog=parser.prog, title="kinds")


def run(args: argparse.Namespace) -> int:
    return run_kind(args)


def with_kind(words: list[str]) -> list[str]:
    """What was typed behind `eval`, with the kind that nobody has to type. A first word that is nearly a kind, with another
    behind it, is a slip and no model."""
    if not words or words[0] in (*KINDS, "-h", "--help"):
        return words
    two = len(words) > 1 and not words[0].startswith("-") and not words[1].startswith("-")
    slip = two and bool(difflib.get_close_matches(words[0], KINDS, n=1)) and not Path(words[0]).exists()
    return words if slip else [DEFAULT_KIND, *words]
