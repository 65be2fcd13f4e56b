"""`fathomlm study show | run | status | report`: studies, their runs and their ledger."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from fathomlm.cli.display import TrainingBar, log, print_table
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.common import optional
from fathomlm.lab.study.jobs import Place, jobs_of, started
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.options import (
    LEDGER,
    WORK,
    LedgerOptions,
    Report,
    RunStudy,
    ShowStudy,
    StudyStatus,
)
from fathomlm.lab.study.queue import Claims, Pace, Visit, select, work_off
from fathomlm.lab.study.report import results_of, write_report
from fathomlm.lab.study.spec import read_studies
from fathomlm.lab.study.training import TrainingExecutor, commit_of_checkout
from fathomlm.sizes import amount
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.setup import check_vocab


def run_show(options: ShowStudy) -> int:
    study = read_studies([options.name])[0]
    place = open_place(options.corpus)
    known = ledger_of(options).standing(place.corpus_checksum)
    rows = []
    for job in jobs_of(study, place):
        record = known.get(job.fingerprint)
        rows.append(
            {
                "run": job.run.key,
                "tokens": job.tokens,
                "flops": job.flops,
                "passes": round(job.passes, 3) if options.corpus is not None else None,
                "state": record["status"] if record is not None else "beyond the corpus" if job.beyond else "left",
                "loss": None if record is None else record.get("loss"),
            }
        )

    def show(record: dict[str, Any]) -> None:
        print(f"{study.name}: {study.title}")
        print(f"answers {', '.join(study.thesis) or 'a question of ours'}; compared with {study.baseline}\n")
        print_table(
            [
                ["run", "tokens", "forward FLOPs", "passes", "state", "loss"],
                *(
                    [r["run"], amount(r["tokens"]), f"{r['flops']:.3g}", optional(r["passes"], ".2f"), r["state"],
                     optional(r["loss"], ".4f")]
                    for r in record["runs"]
                ),
            ]
        )  # fmt: skip
        left = [row["tokens"] for row in record["runs"] if row["state"] == "left"]
        many = len(record["runs"])
        print(f"\n{many - len(left)} of {many} runs are done; the others have {amount(sum(left))} tokens")
        for claim in study.claims:
            print(f"claim ({claim.thesis}): {claim.text}")

    record = {"study": study.name, "title": study.title, "seeds": list(study.seeds), "runs": rows}
    return options.answer(record, show)


def run_status(options: StudyStatus) -> int:
    studies = read_studies(options.names)
    place = open_place(options.corpus)
    known = {mark: one["status"] for mark, one in ledger_of(options).standing(place.corpus_checksum).items()}
    header = ["study", "runs", "finished", "failed", "left", *([] if options.corpus is None else ["beyond"])]
    rows: list[dict[str, Any]] = []
    others: dict[str, str] = {}
    for study in studies:
        try:
            jobs = jobs_of(study, place)
            if place.corpus is not None:
                check_vocab(place.corpus, jobs[0].shaped.parts.architecture)
        except DataError as error:  # such as pairs, where the corpus is text
            if options.names:
                raise
            others[study.name] = str(error)
            continue
        states = [known.get(job.fingerprint, "beyond" if job.beyond else "left") for job in jobs]
        rows.append({"study": study.name, "runs": len(states)} | {state: states.count(state) for state in header[2:]})
    distinct = sum(status == "finished" for status in known.values())

    def show(record: dict[str, Any]) -> None:
        print_table([header, *([str(row[key]) for key in header] for row in rows)])
        if others:
            print(f"\nnot on this corpus: {', '.join(others)}")
        print(f"\n{distinct} distinct finished runs in {options.ledger}")

    record = {"studies": rows, "distinct_finished_runs": distinct, "ledger": str(options.ledger)}
    record |= {"not_on_this_corpus": others} if options.corpus is not None else {}
    return options.answer(record, show)


def run_report(options: Report) -> int:
    studies = [study for study in read_studies(options.names) if options.names or not study.example]
    results = results_of(studies, Ledger(options.ledger))
    written = write_report(results, options.out)
    verdicts = [
        {
            "study": each.study.name,
            "claim": judged.claim.text,
            "budget": judged.budget,
            "difference": f"{judged.one} - {judged.other}",
            **{name: None if judged.found is None else getattr(judged.found, name) for name in ("mean", "low", "high")},
            "verdict": judged.verdict,
            "p_after_correction": judged.p,
            "stated_afterwards": judged.claim.after,
        }
        for each in results
        for judged in each.judged
    ]
    record = {"written": [str(path) for path in written], "verdicts": verdicts}
    return options.answer(record, lambda record: print("\n".join(record["written"])))


def run_queue(options: RunStudy) -> int:
    studies = read_studies(options.names)
    if len({study.name for study in studies}) < len(studies):
        raise OptionError("two of these studies have the same name; one ledger file cannot hold both")
    place = open_place(options.corpus, options.work, options.device)
    visit = Visit(None if options.minutes is None else 60 * options.minutes)
    ledger = Ledger(options.ledger)
    ledger.check_corpus(place.corpus_checksum, str(options.corpus), [study.name for study in studies])
    jobs = select(studies, options.only, lambda study: jobs_of(study, place))
    for job in jobs:
        started(job.shaped.recipe, place)  # refuses a model to start from that is not there
        if place.corpus is not None:
            check_vocab(place.corpus, job.shaped.parts.architecture)
    with TrainingBar("study") as bar:
        executor = TrainingExecutor(  # refuses tasks that are not there, and a corpus without validation
            studies, place, commit=options.commit or commit_of_checkout(), keep=options.keep, tasks=options.tasks,
            processes=lambda: claims.processes(), watch=lambda job: bar,
        )  # fmt: skip
        ledger.check_writable()
        with closing(Claims(options.work)) as claims:
            pace = Pace(ledger.all(), executor.device, claims.processes())
            outcome = work_off(
                jobs, ledger, executor, visit, pace, claims=claims, split=options.split, retry=options.retry_failed, log=log
            )
    options.answer(outcome.to_dict() | {"ledger": str(options.ledger)}, lambda found: _show(found, options.keep))
    return 2 if outcome.interrupted else 1 if outcome.failed else 0


def ledger_of(options: LedgerOptions) -> Ledger:
    """The ledger to read. One that was named is there; the default one need not be."""
    if options.ledger != LEDGER and not options.ledger.is_dir():
        raise DataError(f"there is no ledger {options.ledger}; `fathomlm study run --ledger {options.ledger}` makes one")
    return Ledger(options.ledger)


def open_place(corpus: Path | None, work: Path = WORK, device: str = "auto") -> Place:
    """Where runs are made, or only looked at."""
    if corpus is not None and not (corpus / "corpus.json").is_file():
        raise DataError(f"there is no prepared corpus at {corpus}; make it with `fathomlm data prepare` (see docs/study.md)")
    return Place(None if corpus is None else Corpus.open(corpus), work, device)


def _show(found: dict[str, Any], keep: bool) -> None:
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
        again = f": {found['ledger']} has these runs; give another --ledger to repeat them and keep their models"
        print(f"nothing is left to do{again if keep else ''}")
    if found["interrupted"]:
        print("fathomlm: interrupted; the same command goes on", file=sys.stderr)
