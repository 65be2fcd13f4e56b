"""`fathomlm study list | show | run | status | merge | report`: studies, their runs and their ledger."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.common import DeviceOptions, JsonOptions
from fathomlm.cli.progress import log
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option
from fathomlm.sizes import amount

WORK = Path("runs/study")
NAME = "shipped study (see: fathomlm study list) or YAML file"


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(JsonOptions):
    """What the kinds share."""

    ledger: Path = option(Path("benchmarks/results/study"), metavar="DIR", help="directory of STUDY.json files")


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    corpus: Path | None = option(None, metavar="DIR", help="corpus from `fathomlm data prepare`, to count passes over it")


@dataclass(frozen=True, kw_only=True)
class ListStudies(JsonOptions):
    """List the shipped studies: what they compare, and in how many runs."""

    def run(self) -> int:
        found = [
            {
                "name": study.name,
                "title": study.title,
                "thesis": list(study.thesis),
                "variants": len(study.variants),
                "budgets": len(study.budgets),
                "seeds": len(study.seeds),
                "runs": len(study.runs()),
            }
            for study in read_studies([])
        ]
        if self.json:
            print(json.dumps({"studies": found}))
            return 0
        header = ["study", "runs", "variants", "budgets", "seeds"]
        print_table([header, *([str(study[key]) for key in ("name", *header[1:])] for study in found)])
        for study in found:
            print(f"\n{study['name']}: {study['title']} ({', '.join(study['thesis']) or 'ours'})")
        return 0


@dataclass(frozen=True, kw_only=True)
class ShowStudy(LedgerOptions, CorpusOptions):
    """Show a study: every run in the order of the queue, its tokens and forward FLOPs, passes over --corpus, and whether it
    is in the ledger."""

    name: str = option(positional=True, help=NAME)

    def run(self) -> int:
        study = read_studies([self.name])[0]

        from fathomlm.lab.study.jobs import jobs_of
        from fathomlm.lab.study.ledger import Ledger

        known = {record["fingerprint"]: record for record in Ledger(self.ledger).all()}
        rows = []
        for job in jobs_of(study, open_place(self.corpus)):
            record = known.get(job.fingerprint)
            rows.append(
                {
                    "run": job.run.key,
                    "tokens": job.tokens,
                    "flops": job.flops,
                    "passes": round(job.passes, 3) if self.corpus is not None else None,
                    "state": record["status"] if record is not None else "beyond the corpus" if job.beyond else "left",
                    "loss": None if record is None else record.get("loss"),
                }
            )
        if self.json:
            print(json.dumps({"study": study.name, "title": study.title, "seeds": list(study.seeds), "runs": rows}))
            return 0
        print(f"{study.name}: {study.title}")
        print(f"answers {', '.join(study.thesis) or 'a question of ours'}; compared with {study.baseline}\n")
        header = ["run", "tokens", "forward FLOPs", "passes", "state", "loss"]
        print_table([header, *(_cells(row) for row in rows)])
        left = [row for row in rows if row["state"] == "left"]
        tokens = amount(float(sum(int(str(row["tokens"])) for row in left)))
        print(f"\n{len(rows) - len(left)} of {len(rows)} runs are done; the others have {tokens} tokens")
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


@dataclass(frozen=True, kw_only=True)
class StudyStatus(LedgerOptions):
    """Count the runs of each study that the ledger has, those that failed, and those that are left."""

    names: tuple[str, ...] = option((), positional=True, metavar="NAME", help=NAME, default_text="all shipped studies")

    def run(self) -> int:
        studies = read_studies(self.names)

        from fathomlm.lab.study.jobs import jobs_of
        from fathomlm.lab.study.ledger import Ledger

        ledger, place = Ledger(self.ledger), open_place(None)
        known = {record["fingerprint"]: record["status"] for record in ledger.all()}
        rows = []
        for study in studies:
            states = [known.get(job.fingerprint, "left") for job in jobs_of(study, place)]
            counts = {state: states.count(state) for state in ("finished", "failed", "left")}
            rows.append({"study": study.name, "runs": len(states), **counts})
        distinct = sum(status == "finished" for status in known.values())
        if self.json:
            print(json.dumps({"studies": rows, "distinct_finished_runs": distinct, "ledger": str(self.ledger)}))
            return 0
        header = ["study", "runs", "finished", "failed", "left"]
        print_table([header, *([str(row[key]) for key in header] for row in rows)])
        print(f"\n{distinct} distinct finished runs in {self.ledger}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Merge(LedgerOptions):
    """Add the records of ledger files from another machine to the ledger here. Merging the same files again changes nothing;
    a finished run stands over a failed one."""

    files: tuple[Path, ...] = option(positional=True, metavar="FILE", help="STUDY.json files")

    def run(self) -> int:
        from fathomlm.lab.study.ledger import Ledger

        added = Ledger(self.ledger).merge(self.files)
        if self.json:
            print(json.dumps({"added": added, "ledger": str(self.ledger)}))
            return 0
        for study, number in added.items():
            print(f"{study}: {number} new or better records")
        return 0


@dataclass(frozen=True, kw_only=True)
class Report(LedgerOptions):
    """Write a page from the ledger: for each study a table, a picture and a verdict on each claim, decided by the interval
    of paired differences. Without NAME all shipped studies, examples left out."""

    names: tuple[str, ...] = like(StudyStatus, "names")
    out: Path = option(Path("docs/results.md"), metavar="FILE", help="page to write; pictures go beside it")

    def run(self) -> int:
        studies = [study for study in read_studies(self.names) if self.names or not study.example]

        from fathomlm.lab.study.ledger import Ledger
        from fathomlm.lab.study.report import results_of, write_report

        results = results_of(studies, Ledger(self.ledger))
        written = write_report(results, self.out)
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
        if self.json:
            print(json.dumps({"written": [str(path) for path in written], "verdicts": verdicts}))
            return 0
        for path in written:
            print(path)
        return 0


def read_studies(names: Sequence[str]) -> list[Any]:
    """The studies that were named, each once; all shipped ones where none was."""
    try:
        from fathomlm.lab.study.spec import read_study, shipped_studies
    except ImportError as error:
        raise OptionError(f"studies require the package {error.name}: pip install 'fathomlm[train]'") from error
    return [read_study(name) for name in dict.fromkeys(names or list(shipped_studies()))]


def open_place(corpus: Path | None, work: Path = WORK, device: str = "auto") -> Any:
    """Where runs are made, or only looked at."""
    from fathomlm.lab.study.jobs import Place
    from fathomlm.train.data.corpus import Corpus

    if corpus is not None and not (corpus / "corpus.json").is_file():
        raise DataError(f"there is no prepared corpus at {corpus}; make it with `fathomlm data prepare` (see docs/study.md)")
    return Place(None if corpus is None else Corpus.open(corpus), work, device)


@dataclass(frozen=True, kw_only=True)
class RunStudy(LedgerOptions):
    """Do the runs of one or several studies that the ledger does not have yet: all variants of the first seed, then those of
    the second. Each finished run is in the ledger at once. With --minutes it stops cleanly before the time is over: runs
    that would not finish in time are not started, or, with --split, are saved under --work, where the same command
    continues. A run that fails is recorded with its reason, and the queue continues. The same command may be started several
    times, on one GPU or on several: each process takes what no other has."""

    names: tuple[str, ...] = option(positional=True, metavar="NAME", help=NAME)
    corpus: Path = like(CorpusOptions, "corpus", MISSING, help="corpus from `fathomlm data prepare`")
    work: Path = option(WORK, metavar="DIR", help="where runs keep their checkpoints")
    only: str | None = option(
        None,
        metavar="GLOB[,GLOB]",
        help="runs whose VARIANT or VARIANT/BUDGET/SEED matches one of these, such as 'mor-*' or '*/0'",
    )
    minutes: float | None = option(None, gt=0, metavar="M", help="stop before M minutes are over", default_text="no limit")
    split: bool = option(False, help="also start a run that will not finish in time; it is saved under --work")
    retry_failed: bool = option(False, help="repeat failed runs")
    keep: bool = option(False, help="keep the trained models under --work")
    tasks: Path | None = option(None, metavar="DIR", help="files of the tasks that the studies score, as eval --data")
    device: str = like(DeviceOptions, "device", "auto", help="auto, cpu, cuda or cuda:N", first=None)
    commit: str | None = option(None, metavar="HASH", help="commit for the records, where this is not a git checkout")

    def run(self) -> int:
        studies = read_studies(self.names)
        if len({study.name for study in studies}) < len(studies):
            raise OptionError("two of these studies have the same name; one ledger file cannot hold both")
        place = open_place(self.corpus, self.work, self.device)

        from fathomlm.cli.progress import TrainingBar
        from fathomlm.lab.study.jobs import jobs_of, started
        from fathomlm.lab.study.ledger import Ledger
        from fathomlm.lab.study.queue import Claims, Pace, Visit, select, work_off
        from fathomlm.lab.study.training import TrainingExecutor, commit_of_checkout

        visit = Visit(None if self.minutes is None else 60 * self.minutes)
        ledger = Ledger(self.ledger)
        ledger.check_corpus(place.corpus_checksum, str(self.corpus), [study.name for study in studies])
        jobs = select(studies, self.only, lambda study: jobs_of(study, place))
        for job in jobs:
            started(job.shaped.recipe, place)  # refuses a model to start from that is not there
        commit = self.commit or commit_of_checkout()
        claims = Claims(self.work)
        with closing(claims), TrainingBar("study") as bar:
            executor = TrainingExecutor(
                studies,
                place,
                commit=commit,
                keep=self.keep,
                tasks=self.tasks,
                processes=claims.processes,
                watch=lambda job: bar,
            )
            pace = Pace(ledger.all(), executor.device, claims.processes())
            outcome = work_off(
                jobs, ledger, executor, visit, pace, claims=claims, split=self.split, retry=self.retry_failed, log=log
            )
        _answer(outcome, self)
        return 2 if outcome.interrupted else 0


def _answer(outcome: Any, options: RunStudy) -> None:
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
