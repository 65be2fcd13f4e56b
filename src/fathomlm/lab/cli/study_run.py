"""`fathomlm study run NAME...`: make what is left of some studies, as far as the time goes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from fathomlm.cli.progress import say
from fathomlm.lab.cli.study_options import WORK, add_corpus, add_json, add_ledger, open_place, read_studies

HELP = "make what is left of a study, run by run"
DESCRIPTION = (
    "Makes the runs of one or several studies that the ledger does not have yet: all variants of the first seed, then those "
    "of the second. Each finished run is in the ledger at once. With --minutes it stops cleanly before so many are over: "
    "runs that would not be finished in time are not started, or, with --split, are saved under --work, where the same "
    "command goes on. A run that fails is recorded with its reason, and the queue goes on. The same command may be started "
    "several times, on one GPU or on several: each process takes what no other has."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", metavar="NAME", nargs="+", help="studies (see: fathomlm study list), or YAML files")
    add_corpus(parser, required=True)
    add_ledger(parser)
    add("--work", metavar="DIR", type=Path, default=WORK, help=f"where runs keep their checkpoints ({WORK})")
    add("--only", metavar="GLOB", help="runs whose VARIANT or VARIANT/BUDGET/SEED matches, such as 'mor-*' or '*/0'")
    add("--minutes", metavar="M", type=float, help="stop before so many minutes are over (no limit)")
    add("--split", action="store_true", help="also start a run that will not be finished in time; it is saved under --work")
    add("--retry-failed", action="store_true", help="make failed runs again")
    add("--keep", action="store_true", help="keep the trained models under --work")
    add("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1 (the GPU where there is one)")
    add("--commit", metavar="HASH", help="the commit for the records, where this is not a git checkout")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from fathomlm.errors import OptionError, require

    require(args.minutes is None or args.minutes > 0, "--minutes", "> 0", args.minutes)
    studies = read_studies(args.names)
    if len({study.name for study in studies}) < len(studies):
        raise OptionError("two of these studies have the same name; one ledger file cannot hold both")
    place = open_place(args.corpus, args.work, args.device)

    from fathomlm.cli.training_bar import TrainingBar
    from fathomlm.lab.study.claims import Claims
    from fathomlm.lab.study.identity import commit_of_checkout
    from fathomlm.lab.study.jobs import jobs_of
    from fathomlm.lab.study.ledger import Ledger
    from fathomlm.lab.study.pace import Pace, Visit
    from fathomlm.lab.study.queue import select, work_off
    from fathomlm.lab.study.training import TrainingExecutor

    visit = Visit(None if args.minutes is None else 60 * args.minutes)
    ledger = Ledger(args.ledger)
    ledger.check_corpus(place.mark, str(args.corpus), [study.name for study in studies])
    jobs = select(studies, args.only, lambda study: jobs_of(study, place))
    commit = args.commit or commit_of_checkout()
    claims = Claims(args.work)
    with closing(claims), TrainingBar("study") as bar:
        executor = TrainingExecutor(
            studies, place, commit=commit, keep=args.keep, processes=claims.processes, watch=lambda job: bar
        )
        pace = Pace(ledger.all(), executor.device, claims.processes())
        outcome = work_off(
            jobs, ledger, executor, visit, pace, claims=claims, split=args.split, retry=args.retry_failed, say=say
        )
    _answer(outcome, args)
    return 2 if outcome.interrupted else 0


def _answer(outcome: Any, args: argparse.Namespace) -> None:
    found = outcome.to_dict()
    if args.json:
        print(json.dumps({**found, "ledger": str(args.ledger)}))
        return
    words = {
        "finished": "finished",
        "shared": "taken from another study with the same settings",
        "failed": "failed",
        "stopped": "stopped and saved",
        "elsewhere": "being made by another process",
        "postponed": "left for another visit",
        "beyond": "refused: more passes over the corpus than the study allows",
    }
    for name, meaning in words.items():
        if found[name]:
            print(f"{len(found[name])} {meaning}: {', '.join(found[name])}")
    if not any(found[name] for name in words):
        print("nothing is left to do")
    if outcome.interrupted:
        print("fathomlm: interrupted; the same command goes on", file=sys.stderr)
