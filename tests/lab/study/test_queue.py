"""The queue under a fake clock: an executor that takes as long as it says, and does no work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import OptionError, OutputError, TrainingError
from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Ledger, Record
from fathomlm.lab.study.queue import OVERHEAD, RESERVE, Broken, Outcome, Pace, Stopped, Visit, overhead_of, select, work_off
from fathomlm.lab.study.spec import Study, build_study

Values = Callable[..., dict[str, Any]]
TOKENS = 8 * 4 * 16
"""Of one run of the small study."""


class Machine:
    """A clock, and an executor that moves it."""

    def __init__(self, rate: float = TOKENS / 100, fails: dict[str, Exception] | None = None) -> None:
        self.now = 1000.0
        self.rate = rate
        self.fails = fails or {}
        self.jobs: list[Job] = []
        self.made: list[str] = []
        self.saved: dict[str, int] = {}
        """Tokens done of runs that were stopped."""

    def clock(self) -> float:
        return self.now

    def started(self, job: Job) -> bool:
        return job.name in self.saved

    def tokens_left(self, job: Job) -> int:
        return job.tokens - self.saved.get(job.name, 0)

    def execute(self, job: Job, visit: Visit, *, split: bool) -> Record:
        if job.run.variant.name in self.fails:
            raise self.fails[job.run.variant.name]
        self.now += OVERHEAD
        can = int(min(max(0.0, visit.left), 1e6) * self.rate)
        if can < self.tokens_left(job):
            self.saved[job.name] = self.saved.get(job.name, 0) + can
            self.now += can / self.rate
            raise Stopped(by_user=False, rate=self.rate)
        self.now += self.tokens_left(job) / self.rate
        self.saved.pop(job.name, None)
        self.made.append(job.name.removeprefix("small/"))
        finished = {"status": "finished", "loss": 1.0, "tokens_per_s": self.rate, "seconds": 1.0}
        return self.failed(job, "") | finished | {"overhead_seconds": OVERHEAD, "environment": {"device": "fake"}}

    def tidy(self, job: Job) -> None:
        """There is nothing to remove."""

    def failed(self, job: Job, reason: str) -> Record:
        run = job.run
        return {
            "study": run.study, "variant": run.variant.name, "budget": run.budget.name, "seed": run.seed,
            "fingerprint": job.fingerprint, "data": {"mark": job.corpus_checksum}, "status": "failed", "reason": reason,
            "environment": {"device": "fake"}, "date": "2026-01-01",
        }  # fmt: skip


def visit_with(machine: Machine, study: Study, place: Path, seconds: float | None = None, **options: Any) -> Outcome:
    ledger = Ledger(place / "ledger")
    found = machine.jobs = machine.jobs or jobs_of(study, Place(None, place))
    jobs = select([study], options.pop("only", None), lambda each: found)
    visit = Visit(seconds, machine.clock)
    return work_off(jobs, ledger, machine, visit, Pace(ledger.all(), "fake"), **options)


SEED_0 = [f"{name}/short/0" for name in ("plain", "recursive", "mor")]
SEED_1 = [f"{name}/short/1" for name in ("plain", "recursive", "mor")]


def test_without_a_limit_everything_is_made_in_order(values: Values, tmp_path: Path) -> None:
    machine, study = Machine(), build_study(values(), "test")
    outcome = visit_with(machine, study, tmp_path)
    assert machine.made == SEED_0 + SEED_1
    assert [name.removeprefix("small/") for name in outcome.finished] == machine.made
    again = visit_with(machine, study, tmp_path)
    assert again == Outcome()
    assert machine.made == SEED_0 + SEED_1


def test_runs_that_do_not_fit_are_left_for_another_visit(values: Values, tmp_path: Path) -> None:
    machine, study = Machine(), build_study(values(), "test")
    one = 100 + OVERHEAD
    outcome = visit_with(machine, study, tmp_path, seconds=RESERVE + 2.5 * one)
    assert machine.made == SEED_0[:2], "the third's rate is not known, so it is tried, and seen to be too slow"
    assert outcome.stopped == ["small/mor/short/0"]
    assert len(outcome.postponed) == 3
    begin = machine.now
    outcome = visit_with(machine, study, tmp_path, seconds=RESERVE + 2.1 * one)
    assert machine.made == [*SEED_0, "plain/short/1"], "what was started comes first"
    assert machine.now - begin <= 2.1 * one + RESERVE
    assert not outcome.stopped, "a run whose rate is known, and that does not fit, is not started"


def test_a_split_run_goes_on_in_the_next_visit(values: Values, tmp_path: Path) -> None:
    machine, study = Machine(), build_study(values(seeds=[0]), "test")
    visits = 0
    while len(machine.made) < 3:
        before = machine.now
        visit_with(machine, study, tmp_path, seconds=RESERVE + OVERHEAD + 60, split=True)
        assert machine.now - before <= RESERVE + OVERHEAD + 60
        visits += 1
        assert visits < 20
    assert machine.made == SEED_0


def test_a_failed_run_is_recorded_and_the_queue_goes_on(values: Values, tmp_path: Path) -> None:
    study = build_study(values(seeds=[0]), "test")
    machine = Machine(fails={"plain": TrainingError("the loss was not finite"), "mor": MemoryError("no room")})
    outcome = visit_with(machine, study, tmp_path)
    assert machine.made == ["recursive/short/0"]
    assert outcome.failed == ["small/plain/short/0", "small/mor/short/0"]
    reasons = {r["variant"]: r["reason"] for r in Ledger(tmp_path / "ledger").read("small") if r["status"] == "failed"}
    assert reasons == {"plain": "the loss was not finite", "mor": "MemoryError: no room"}
    assert visit_with(Machine(), study, tmp_path) == Outcome(), "it would fail again"
    retried = Machine()
    visit_with(retried, study, tmp_path, retry=True)
    assert retried.made == ["plain/short/0", "mor/short/0"]
    assert {r["status"] for r in Ledger(tmp_path / "ledger").read("small")} == {"finished"}


def test_a_run_counts_though_its_checkpoints_cannot_be_removed(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(job: Job) -> None:
        raise OutputError(f"cannot remove {job.name}")

    machine, study = Machine(), build_study(values(seeds=[0]), "test")
    monkeypatch.setattr(machine, "tidy", full)
    said: list[str] = []
    outcome = visit_with(machine, study, tmp_path, log=said.append)
    assert [name.removeprefix("small/") for name in outcome.finished] == SEED_0
    assert sum(line.endswith("cannot remove small/plain/short/0") for line in said) == 1


def test_a_broken_device_ends_the_visit(values: Values, tmp_path: Path) -> None:
    machine = Machine(fails={"plain": Broken("illegal address")})
    outcome = visit_with(machine, build_study(values(), "test"), tmp_path)
    assert outcome.failed == ["small/plain/short/0"]
    assert machine.made == []


def test_only_takes_a_pattern(values: Values, tmp_path: Path) -> None:
    study = build_study(values(), "test")
    machine = Machine()
    visit_with(machine, study, tmp_path, only="re*")
    visit_with(machine, study, tmp_path, only="*/1")
    assert machine.made == ["recursive/short/0", "recursive/short/1", "plain/short/1", "mor/short/1"]
    visit_with(machine, study, tmp_path, only="plain/*/0, mo*")
    assert machine.made[4:] == ["plain/short/0", "mor/short/0"]
    with pytest.raises(OptionError, match="--only nothing matches no run; variants: plain, recursive, mor"):
        visit_with(machine, study, tmp_path, only="nothing")
    with pytest.raises(OptionError, match="--only moor matches no run; variants: plain, recursive, mor"):
        visit_with(machine, study, tmp_path, only="plain,moor")


def test_a_run_of_another_study_with_the_same_settings_is_taken_over(values: Values, tmp_path: Path) -> None:
    machine, ledger = Machine(), Ledger(tmp_path / "ledger")
    studies = [build_study(values(seeds=[0]), "test"), build_study(values(name="other", seeds=[0, 1]), "test")]
    jobs = select(studies, None, lambda each: jobs_of(each, Place(None, tmp_path)))
    assert [job.run.seed for job in jobs] == [0] * 6 + [1] * 3
    outcome = work_off(jobs, ledger, machine, Visit(None, machine.clock), Pace([], "fake"))
    assert len(outcome.finished) == 6
    assert outcome.shared == ["other/plain/short/0", "other/recursive/short/0", "other/mor/short/0"]
    assert [record.get("shared") for record in ledger.read("other")] == ["small"] * 3 + [None] * 3


def test_more_passes_than_allowed_are_refused(values: Values, tmp_path: Path, corpus: Path) -> None:
    from fathomlm.train.data.corpus import Corpus

    place = Place(Corpus.open(corpus), tmp_path)
    study = build_study(values(budgets={"short": {"steps": 8}, "huge": {"epochs": 4.5}}, seeds=[0]), "test")
    jobs = jobs_of(study, place)
    assert [round(job.passes, 1) for job in jobs if job.run.budget.name == "huge"] == [4.5] * 3
    machine, ledger = Machine(), Ledger(tmp_path / "ledger")
    outcome = work_off(jobs, ledger, machine, Visit(None, machine.clock), Pace([], "fake"))
    assert machine.made == SEED_0
    assert outcome.beyond == [f"small/{name}/huge/0" for name in ("plain", "recursive", "mor")]


def test_overhead_is_all_that_the_rate_does_not_explain() -> None:
    """Compiling happens within steps; a visit that left it out would start runs that do not fit."""
    assert overhead_of(wall=90.0, tokens=3000, rate=100.0) == 60.0
    assert overhead_of(wall=20.0, tokens=3000, rate=100.0) == 0.0
    assert overhead_of(wall=20.0, tokens=3000, rate=None) == 20.0
    record = {"study": "s", "variant": "v", "status": "finished", "environment": {"device": "d"}, "tokens_per_s": 100.0}
    pace = Pace([record | {"overhead_seconds": 60.0}], "d")
    assert pace.seconds("s", "v", 3000) == 90.0
    assert pace.seconds("s", "w", 3000) is None
    assert Pace([record | {"overhead_seconds": 60.0}], "another").seconds("s", "v", 3000) is None
