"""`fathomlm study run NAME...`: make what is left of some studies, as far as the time goes."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.progress import say
from fathomlm.errors import OptionError
from fathomlm.lab.cli.study import NAME, WORK, LedgerOptions, open_place, read_studies
from fathomlm.options import option


@dataclass(frozen=True, kw_only=True)
class Run(LedgerOptions):
    """Do the runs of one or several studies that the ledger does not have yet: all variants of the first seed, then those of
    the second. Each finished run is in the ledger at once. With --minutes it stops cleanly before the time is over: runs
    that would not finish in time are not started, or, with --split, are saved under --work, where the same command
    continues. A run that fails is recorded with its reason, and the queue continues. The same command may be started several
    times, on one GPU or on several: each process takes what no other has."""

    names: tuple[str, ...] = option(positional=True, metavar="NAME", help=NAME)
    corpus: Path = option(metavar="DIR", help="corpus from `fathomlm data prepare`")
    work: Path = option(WORK, metavar="DIR", help="where runs keep their checkpoints")
    only: str | None = option(
        None, metavar="GLOB", help="runs whose VARIANT or VARIANT/BUDGET/SEED matches, such as 'mor-*' or '*/0'"
    )
    minutes: float | None = option(None, gt=0, metavar="M", help="stop before M minutes are over", default_text="no limit")
    split: bool = option(False, help="also start a run that will not finish in time; it is saved under --work")
    retry_failed: bool = option(False, help="repeat failed runs")
    keep: bool = option(False, help="keep the trained models under --work")
    device: str = option("auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    commit: str | None = option(None, metavar="HASH", help="commit for the records, where this is not a git checkout")

    def run(self) -> int:
        studies = read_studies(self.names)
        if len({study.name for study in studies}) < len(studies):
            raise OptionError("two of these studies have the same name; one ledger file cannot hold both")
        place = open_place(self.corpus, self.work, self.device)

        from fathomlm.cli.progress import TrainingBar
        from fathomlm.lab.study.claims import Claims
        from fathomlm.lab.study.identity import commit_of_checkout
        from fathomlm.lab.study.jobs import jobs_of
        from fathomlm.lab.study.ledger import Ledger
        from fathomlm.lab.study.pace import Pace, Visit
        from fathomlm.lab.study.queue import select, work_off
        from fathomlm.lab.study.training import TrainingExecutor

        visit = Visit(None if self.minutes is None else 60 * self.minutes)
        ledger = Ledger(self.ledger)
        ledger.check_corpus(place.mark, str(self.corpus), [study.name for study in studies])
        jobs = select(studies, self.only, lambda study: jobs_of(study, place))
        commit = self.commit or commit_of_checkout()
        claims = Claims(self.work)
        with closing(claims), TrainingBar("study") as bar:
            executor = TrainingExecutor(
                studies, place, commit=commit, keep=self.keep, processes=claims.processes, watch=lambda job: bar
            )
            pace = Pace(ledger.all(), executor.device, claims.processes())
            outcome = work_off(
                jobs, ledger, executor, visit, pace, claims=claims, split=self.split, retry=self.retry_failed, say=say
            )
        _answer(outcome, self)
        return 2 if outcome.interrupted else 0


def _answer(outcome: Any, options: Run) -> None:
    found = outcome.to_dict()
    if options.json:
        print(json.dumps({**found, "ledger": str(options.ledger)}))
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
