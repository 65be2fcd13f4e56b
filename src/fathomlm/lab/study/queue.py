"""The queue of a visit: which runs are left, how long each will take by what the ledger says of its variant, which fit into
the time, and what became of each.

Several processes may work off one queue, on one GPU or on several. A process claims what it is going to make; others pass
over it. Claims are the operating system's locks (flock) on small files of the work directory, so that a process that was
killed holds nothing. Budgets of one variant and seed are claimed together: a larger one branches from the smaller one's
checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from fathomlm.errors import FathomError, OptionError, writing
from fathomlm.lab.study.jobs import Job
from fathomlm.lab.study.ledger import Ledger, Record, fingerprint, identity
from fathomlm.lab.study.spec import Study

RESERVE = 15.0
"""Seconds at the end of a visit that are kept for a last validation, a checkpoint and the record."""
OVERHEAD = 30.0
"""Seconds that a run takes beyond its tokens at full rate (setting up, compiling, validating) where none is recorded."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Visit:
    """The time that one call of `study run` may take; without a limit, all of it."""

    seconds: float | None = None
    clock: Clock = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.clock())

    @property
    def left(self) -> float:
        """Seconds that steps may still take."""
        return float("inf") if self.seconds is None else self.seconds - RESERVE - (self.clock() - self.began)


def overhead_of(*, wall: float, tokens: int, rate: float | None) -> float:
    """Seconds of a process that its tokens at full rate do not explain; compiling is among them."""
    return round(max(0.0, wall - (tokens / rate if rate else 0.0)), 1)


class Pace:
    """Rates and overheads by variant, on one kind of device."""

    def __init__(self, records: Iterable[Record], device: str, processes: int = 1) -> None:
        """`processes` share the device: a rate holds for as many only."""
        self._rates: dict[tuple[str, str], float] = {}
        self._flops: dict[tuple[str, str], float] = {}
        """Forward FLOPs a second, from which the rates of variants that were never trained are estimated."""
        self._overheads: list[float] = []
        self._device = device
        self._processes = processes
        for record in records:
            self.learn(record)

    def learn(self, record: Record) -> None:
        if record["status"] != "finished" or record["environment"]["device"] != self._device:
            return
        if record.get("processes", 1) != self._processes:
            return
        if record.get("tokens_per_s"):
            place = record["study"], record["variant"]
            self._rates[place] = float(record["tokens_per_s"])
            self._flops[place] = self._rates[place] * float(record.get("flops_per_token") or 0)
        self._overheads.append(float(record["overhead_seconds"]))

    def measured(self, study: str, variant: str, rate: float) -> None:
        """A rate that was seen in a run's first steps."""
        self._rates[study, variant] = rate

    def seconds(self, study: str, variant: str, tokens: float, flops_per_token: float = 0) -> float | None:
        """What so many tokens of a variant will take: by its own rate, or else by the FLOPs a second of the others; None
        where nothing is known."""
        rate = self._rates.get((study, variant))
        known = [rate for rate in self._flops.values() if rate]
        if rate is None and known and flops_per_token:
            rate = median(known) / flops_per_token
        return None if not rate else tokens / rate + self.overhead

    @property
    def overhead(self) -> float:
        return fmean(self._overheads) if self._overheads else OVERHEAD


class Claims:
    """What this process has claimed, and how many processes there are; all of it ends with the process, or with `close`."""

    def __init__(self, work: Path) -> None:
        self._directory = work / ".claims"
        self._held: dict[str, int] = {}
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._own = f"process-{os.getpid()}"
        self._take(self._own)

    def take(self, job: Job) -> bool:
        """Whether the job is this process's to make."""
        return self._take(key_of(job))

    def processes(self) -> int:
        """Live processes that share the work directory, this one among them."""
        count = 1
        for path in self._directory.glob("process-*"):
            if path.name == self._own:
                continue
            handle = _lock(path)
            if handle is None:
                count += 1
            else:  # its process is gone
                with suppress(OSError):
                    path.unlink()
                os.close(handle)
        return count

    def close(self) -> None:
        with suppress(OSError):
            (self._directory / self._own).unlink()
        for handle in self._held.values():
            os.close(handle)
        self._held = {}

    def _take(self, name: str) -> bool:
        if name in self._held:
            return True
        handle = _lock(self._directory / name)
        if handle is None:
            return False
        self._held[name] = handle
        return True


def key_of(job: Job) -> str:
    """Settings and seed of a run without its budget: the same in every study that asks for it."""
    return f"{fingerprint(job.shaped.recipe, without='budget')}-{job.corpus_checksum}"


def _lock(path: Path) -> int | None:
    """A handle that holds the file's lock; None where another process does."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


Log = Callable[[str], None]


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

    def tidy(self, job: Job) -> None:
        """Remove what a finished run needs no more, once its record is kept: until then that is all there is of it."""
        ...


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
    """The runs of all studies, first seeds first; `only` has patterns over VARIANT, or over VARIANT/BUDGET/SEED, with commas
    between them."""
    rank = {(s.name, seed): (place, number) for number, s in enumerate(studies) for place, seed in enumerate(s.seeds)}
    found = [job for study in studies for job in jobs(study)]
    if only is not None:
        patterns = [pattern.strip() for pattern in only.split(",")]

        def matches(job: Job, pattern: str) -> bool:
            return any(fnmatchcase(name, pattern) for name in (job.run.key, job.run.variant.name))

        for pattern in patterns:  # each of them: beside others that match, a typing error would go unnoticed
            if not any(matches(job, pattern) for job in found):
                names = ", ".join(dict.fromkeys(job.run.variant.name for job in found))
                raise OptionError(f"--only {pattern} matches no run; variants: {names}")
        found = [job for job in found if any(matches(job, pattern) for pattern in patterns)]
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
    log: Log = lambda text: None,
) -> Outcome:
    """Make what is left of `jobs` in order, as far as the time goes; every finished run is in the ledger at once."""
    outcome = Outcome()
    left = _left(jobs, ledger, _known(ledger), outcome, retry)
    tried: set[tuple[str, str]] = set()
    for job in sorted(left, key=lambda job: not executor.started(job)):
        known = _known(ledger)
        if _made(job, known, retry and (job.fingerprint, job.corpus_checksum) not in tried):  # in the meantime
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
        tried.add((job.fingerprint, job.corpus_checksum))
        expected = "" if seconds is None else f", about {seconds:,.0f} s"
        log(f"{job.name}: {job.tokens / 1e6:,.4g}M tokens, {job.passes:.2f} passes{expected}")
        try:
            record = executor.execute(job, visit, split=split)
        except Stopped as stopped:
            outcome.stopped.append(job.name)
            log(f"{job.name}: stopped and saved; the same command goes on with it")
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
            log(f"{job.name}: failed: {record['reason']}")
            if isinstance(error, Broken):
                break
            continue
        ledger.add(job.run.study, [record])
        try:
            executor.tidy(job)
        except FathomError as error:  # the run is kept, whatever became of its checkpoints
            log(f"{job.name}: {error}")
        pace.learn(record)
        outcome.finished.append(job.name)
        log(f"{job.name}: loss {record['loss']:.4f} after {record['seconds']:,.0f} s")
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
    record = known.get((job.fingerprint, job.corpus_checksum))
    return record is not None and not (retry and record["status"] == "failed")


def _share(job: Job, known: dict[tuple[str, str], Record], ledger: Ledger, outcome: Outcome) -> None:
    record = known[job.fingerprint, job.corpus_checksum]
    if any(identity(own) == identity(record) for own in ledger.read(job.run.study)):
        return
    run = job.run
    named = {"study": run.study, "variant": run.variant.name, "budget": run.budget.name}
    ledger.add(run.study, [record | named | {"shared": record.get("shared") or record["study"]}])
    outcome.shared.append(job.name)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, FathomError) else f"{type(error).__name__}: {text}"
