"""`fathomlm study merge FILE...`: add another machine's records to the ledger."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fathomlm.lab.cli.study_options import add_json, add_ledger

HELP = "add the records of another machine's ledger"
DESCRIPTION = (
    "Adds the records of ledger files from another machine to the ledger here. Merging the same files again changes "
    "nothing; a finished run stands over a failed one."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="STUDY.json files")
    add_ledger(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from fathomlm.lab.study.ledger import Ledger

    added = Ledger(args.ledger).merge(args.files)
    if args.json:
        print(json.dumps({"added": added, "ledger": str(args.ledger)}))
        return 0
    for study, number in added.items():
        print(f"{study}: {number} new or better records")
    return 0
