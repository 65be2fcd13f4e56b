"""`fathomlm study report`: tables, pictures and verdicts from the ledger."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fathomlm.lab.cli.study_options import add_json, add_ledger, read_studies

HELP = "write tables, pictures and verdicts from the ledger"
DESCRIPTION = (
    "Writes a page from the ledger: for each study a table, a picture and a verdict on each claim, decided by the interval "
    "of paired differences. Without NAME all studies that come with FathomLM, examples left out."
)
OUT = Path("docs/results.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="studies, or YAML files")
    add_ledger(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, default=OUT, help=f"the page; pictures go beside it ({OUT})")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    studies = [study for study in read_studies(args.names) if args.names or not study.example]

    from fathomlm.lab.study.ledger import Ledger
    from fathomlm.lab.study.report import results_of, write_report

    results = results_of(studies, Ledger(args.ledger))
    written = write_report(results, args.out)
    verdicts = [
        {
            "study": each.study.name,
            "claim": judged.claim.text,
            "budget": judged.budget,
            "difference": f"{judged.one} - {judged.other}",
            "mean": None if judged.found is None else judged.found.mean,
            "low": None if judged.found is None else judged.found.low,
            "high": None if judged.found is None else judged.found.high,
            "verdict": judged.verdict,
        }
        for each in results
        for judged in each.judged
    ]
    if args.json:
        print(json.dumps({"written": [str(path) for path in written], "verdicts": verdicts}))
        return 0
    for path in written:
        print(path)
    return 0
