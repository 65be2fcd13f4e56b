"""The queue of a visit: which runs are left, which of them fit into the time, and what became of each."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from fathomlm.errors import FathomError, OptionError
from fathomlm.lab.study.claims import Claims
from fathomlm.lab.study.jobs import Job
from fathomlm.lab.study.ledger import Ledger, Record, identity
from fathomlm.lab.study.pace import Pace, Visit
from fathomlm.lab.study.spec import Study

Say = Callable[[str], None]


class Stopped(Exception):
    """A run that was stopped and saved before its end; the same command goes on with it."""

    def __init__(self, *, by_user: bool, rate: float | None = None) -> None:
        super().__init__("stopped")
        self.by_user = by_user
        self.rate = rate
        """Tokens a second, where some were measured."""


class Broken(Exception):
    """A run after which the device cannot be used any more in this process."""


class Executor(Protocol):
    """Makes runs of one kind."""

    def tokens_left(self, job: Job) -> int:
        """What is still to be trained: less than all where a checkpoint is at hand."""
        ...

    def started(self, job: Job) -> bool: ...

    def execute(self, job: Job, visit: Visit, *, split: bool) -> Record: ...

    def failed(self, job: Job, reason: str) -> Record: ...


@dataclass(slots=True)
class Outcome:
    """What a visit did, as names of runs."""

    finished: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    """Found in another study's ledger, with the same settings."""
    failed: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    """Saved, to go on with."""
    postponed: list[str] = field(default_factory=list)
    """There was no time for them."""
    elsewhere: list[str] = field(default_factory=list)
    """Another process has claimed them."""
    beyond: list[str] = field(default_factory=list)
    """Refused: more passes over the corpus than the study allows."""
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def select(studies: Sequence[Study], only: str | None, jobs: Callable[[Study], list[Job]]) -> list[Job]:
    """The runs of all studies, first seeds first; `only` is a pattern over VARIANT, or over VARIANT/BUDGET/SEED."""
    rank = {(s.name, seed): (place, number) for number, s in enumerate(studies) for place, seed in enumerate(s.seeds)}
    found = [job for study in studies for job in jobs(study)]
    if only is not None:
        chosen = [job for job in found if fnmatchcase(job.run.key, only) or fnmatchcase(job.run.variant.name, only)]
        if not chosen:
            names = ", ".join(dict.fromkeys(job.run.variant.name for job in found))
            raise OptionError(f"--only {only} matches no run; variants: {names}")
        found = chosen
    return sorted(found, key=lambda job: rank[job.run.study, job.run.seed])


def work_off(
    jobs: Sequence[Job],
    ledger: Ledger,
    executor: Executor,
    visit: Visit,
    pace: Pace,
    *,
    claims: Claims | None = None,
    split: bool = False,
    retry: bool = False,
    say: Say = lambda text: None,
) -> Outcome:
    """Make what is left of `jobs` in order, as far as the time goes; every finished run is in the ledger at once."""
    outcome = Outcome()
    left = _left(jobs, ledger, _known(ledger), outcome, retry)
    tried: set[tuple[str, str]] = set()
    for job in sorted(left, key=lambda job: not executor.started(job)):
        known = _known(ledger)
        if _made(job, known, retry and (job.fingerprint, job.mark) not in tried):  # in the meantime
            _share(job, known, ledger, outcome)
            continue
        shaped, run = job.shaped, job.run
        seconds = pace.seconds(run.study, run.variant.name, executor.tokens_left(job), shaped.flops_per_token)
        fits = visit.left > pace.overhead if seconds is None else seconds <= visit.left
        if not fits and not (visit.left > pace.overhead and (split or executor.started(job))):
            outcome.postponed.append(job.name)
            continue
        if claims is not None and not claims.take(job):
            outcome.elsewhere.append(job.name)
            continue
        tried.add((job.fingerprint, job.mark))
        expected = "" if seconds is None else f", about {seconds:,.0f} s"
        say(f"{job.name}: {job.tokens / 1e6:,.4g}M tokens, {job.passes:.2f} passes{expected}")
        try:
            record = executor.execute(job, visit, split=split)
        except Stopped as stopped:
            outcome.stopped.append(job.name)
            say(f"{job.name}: stopped and saved; the same command goes on with it")
            if stopped.rate:
                pace.measured(job.run.study, job.run.variant.name, stopped.rate)
            if stopped.by_user:
                outcome.interrupted = True
                break
            continue
        except Exception as error:  # one variant's failure must not cost the others their place in the queue
            record = executor.failed(job, _reason(error))
            if not isinstance(error, FathomError):
                traceback.print_exc(file=sys.stderr)
            ledger.add(job.run.study, [record])
            outcome.failed.append(job.name)
            say(f"{job.name}: failed: {record['reason']}")
            if isinstance(error, Broken):
                break
            continue
        ledger.add(job.run.study, [record])
        pace.learn(record)
        outcome.finished.append(job.name)
        say(f"{job.name}: loss {record['loss']:.4f} after {record['seconds']:,.0f} s")
    known = _known(ledger)
    for job in jobs:  # what was made since, by this process or another, for another study
        if not job.beyond and _made(job, known, retry):
            _share(job, known, ledger, outcome)
    return outcome


def _known(ledger: Ledger) -> dict[tuple[str, str], Record]:
    """All records by what they are known by; a finished one stands over a failed one."""
    return {identity(record): record for record in sorted(ledger.all(), key=lambda r: r["status"] == "finished")}


def _left(
    jobs: Sequence[Job], ledger: Ledger, known: dict[tuple[str, str], Record], outcome: Outcome, retry: bool
) -> list[Job]:
    """The runs that are not made; those that another study made, with the same settings, are written down here."""
    left = []
    for job in jobs:
        if job.beyond:
            outcome.beyond.append(job.name)
        elif _made(job, known, retry):
            _share(job, known, ledger, outcome)
        else:
            left.append(job)
    return left


def _made(job: Job, known: dict[tuple[str, str], Record], retry: bool) -> bool:
    """A failed run counts as made, since it would fail again, unless it is to be tried again."""
    record = known.get((job.fingerprint, job.mark))
    return record is not None and not (retry and record["status"] == "failed")


def _share(job: Job, known: dict[tuple[str, str], Record], ledger: Ledger, outcome: Outcome) -> None:
    record = known[job.fingerprint, job.mark]
    if any(identity(own) == identity(record) for own in ledger.read(job.run.study)):
        return
    run = job.run
    named = {"study": run.study, "variant": run.variant.name, "budget": run.budget.name}
    ledger.add(run.study, [record | named | {"shared": record.get("shared") or record["study"]}])
    outcome.shared.append(job.name)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, FathomError) else f"{type(error).__name__}: {text}"
