"""`fathomlm study KIND`: many runs under one plan, with a ledger. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse

from fathomlm.cli.kinds import add_kinds, run_kind

HELP = "make the runs of a study, and the tables and verdicts that follow from them"
DESCRIPTION = (
    "A study is a YAML file: runs that differ in one thing each, seeds, and the claims that they are to decide. `run` makes "
    "what is left of it, as far as a time budget goes, and adds each finished run to a ledger; `merge` adds another "
    "machine's; `report` writes tables, pictures and verdicts from it."
)
KINDS = {kind: f"fathomlm.lab.cli.study_{kind}" for kind in ("list", "show", "run", "status", "merge", "report")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, KINDS, prog=parser.prog)


def run(args: argparse.Namespace) -> int:
    return run_kind(args)
