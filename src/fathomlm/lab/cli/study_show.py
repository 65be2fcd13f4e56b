"""`fathomlm study show NAME`: a study's runs, what they take, and which are made."""

from __future__ import annotations

import argparse
import json

from fathomlm.cli.progress import amount
from fathomlm.lab.cli.study_options import add_corpus, add_json, add_ledger, open_place, print_rows, read_studies

HELP = "a study's runs: tokens, FLOPs, and which are finished"
DESCRIPTION = (
    "Shows a study: every run in the order of the queue, its tokens and forward FLOPs, passes over --corpus where that is "
    "given, and whether it is in the ledger. NAME is a shipped study or a YAML file."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a study (see: fathomlm study list), or a YAML file")
    add_corpus(parser, required=False)
    add_ledger(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    study = read_studies([args.name])[0]

    from fathomlm.lab.study.jobs import jobs_of
    from fathomlm.lab.study.ledger import Ledger

    known = {record["fingerprint"]: record for record in Ledger(args.ledger).all()}
    rows = []
    for job in jobs_of(study, open_place(args.corpus)):
        record = known.get(job.fingerprint)
        rows.append(
            {
                "run": job.run.key,
                "tokens": job.tokens,
                "flops": job.flops,
                "passes": round(job.passes, 3) if args.corpus is not None else None,
                "state": record["status"] if record is not None else "beyond the corpus" if job.beyond else "left",
                "loss": None if record is None else record.get("loss"),
            }
        )
    if args.json:
        print(json.dumps({"study": study.name, "title": study.title, "seeds": list(study.seeds), "runs": rows}))
        return 0
    print(f"{study.name}: {study.title}")
    print(f"answers {', '.join(study.thesis) or 'a question of ours'}; compared with {study.baseline}\n")
    header = ["run", "tokens", "forward FLOPs", "passes", "state", "loss"]
    print_rows([header, *(_cells(row) for row in rows)])
    left = [row for row in rows if row["state"] == "left"]
    tokens = amount(float(sum(int(str(row["tokens"])) for row in left)))
    print(f"\n{len(rows) - len(left)} of {len(rows)} runs need no more work; the others together have {tokens} tokens")
    for claim in study.claims:
        print(f"claim ({claim.thesis}): {claim.text}")
    return 0


def _cells(row: dict[str, object]) -> list[str]:
    passes, loss = row["passes"], row["loss"]
    return [
        str(row["run"]),
        amount(float(str(row["tokens"]))),
        f"{float(str(row['flops'])):.3g}",
        "-" if passes is None else f"{float(str(passes)):.2f}",
        str(row["state"]),
        "-" if loss is None else f"{float(str(loss)):.4f}",
    ]
