"""`fathomlm study status`: how far each study is."""

from __future__ import annotations

import argparse
import json

from fathomlm.lab.cli.study_options import add_json, add_ledger, open_place, print_rows, read_studies

HELP = "how far each study is"
DESCRIPTION = "Counts the runs of each study that the ledger has, those that failed, and those that are left."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="studies; all that come with FathomLM where none is named")
    add_ledger(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    studies = read_studies(args.names)

    from fathomlm.lab.study.jobs import jobs_of
    from fathomlm.lab.study.ledger import Ledger

    ledger, place = Ledger(args.ledger), open_place(None)
    known = {record["fingerprint"]: record["status"] for record in ledger.all()}
    rows = []
    for study in studies:
        states = [known.get(job.fingerprint, "left") for job in jobs_of(study, place)]
        counts = {state: states.count(state) for state in ("finished", "failed", "left")}
        rows.append({"study": study.name, "runs": len(states), **counts})
    distinct = sum(status == "finished" for status in known.values())
    if args.json:
        print(json.dumps({"studies": rows, "distinct_finished_runs": distinct, "ledger": str(args.ledger)}))
        return 0
    header = ["study", "runs", "finished", "failed", "left"]
    print_rows([header, *([str(row[key]) for key in header] for row in rows)])
    print(f"\n{distinct} distinct finished runs in {args.ledger}")
    return 0
