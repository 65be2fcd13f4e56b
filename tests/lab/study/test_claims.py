"""Several processes on one queue: claims, and what a process does with runs that another has."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.queue import Claims, Pace, Visit, key_of, work_off
from fathomlm.lab.study.spec import build_study
from lab.study.test_queue import Machine

Values = Callable[..., dict[str, Any]]


def jobs_in(values: dict[str, Any], place: Path) -> list[Job]:
    return jobs_of(build_study(values, "test"), Place(None, place))


def test_budgets_of_a_variant_and_seed_are_claimed_together(values: Values, tmp_path: Path) -> None:
    two = {"short": {"steps": 8}, "long": {"steps": 16}}
    keys = {job.run.key: key_of(job) for job in jobs_in(values(budgets=two, chain=True), tmp_path)}
    assert keys["mor/short/0"] == keys["mor/long/0"]
    assert len(set(keys.values())) == 6, "three variants, two seeds"
    named_otherwise = {job.run.key: key_of(job) for job in jobs_in(values(name="other"), tmp_path)}
    assert named_otherwise["mor/short/1"] == keys["mor/short/1"], "a run that two studies ask for is one claim"


def test_what_one_process_has_claimed_another_passes_over(values: Values, tmp_path: Path) -> None:
    first, jobs = Claims(tmp_path), jobs_in(values(seeds=[0]), tmp_path)
    assert first.take(jobs[0])
    assert first.take(jobs[0]), "again"
    second, machine, ledger = Claims(tmp_path), Machine(), Ledger(tmp_path / "ledger")
    visit = Visit(None, machine.clock)
    outcome = work_off(jobs, ledger, machine, visit, Pace([], "fake"), claims=second)
    assert outcome.elsewhere == ["small/plain/short/0"]
    assert machine.made == ["recursive/short/0", "mor/short/0"]
    first.close()
    outcome = work_off(jobs, ledger, machine, visit, Pace([], "fake"), claims=second)
    assert outcome.finished == ["small/plain/short/0"], "its process is gone without having made it"


def test_a_run_that_another_process_made_for_another_study_is_shared(values: Values, tmp_path: Path) -> None:
    ledger, machine = Ledger(tmp_path / "ledger"), Machine()
    jobs = jobs_in(values(seeds=[0]), tmp_path)
    theirs = jobs_in(values(name="theirs", seeds=[0]), tmp_path)

    class Meanwhile(Machine):
        """While this process makes its first run, another adds what it made of the second."""

        def execute(self, job: Job, visit: Visit, *, split: bool) -> dict[str, Any]:
            ledger.add("theirs", [machine.execute(theirs[1], visit, split=split)])
            return super().execute(job, visit, split=split)

    here = Meanwhile()
    outcome = work_off(jobs, ledger, here, Visit(None, here.clock), Pace([], "fake"), claims=Claims(tmp_path))
    assert here.made == ["plain/short/0", "mor/short/0"]
    assert outcome.shared == ["small/recursive/short/0"]


def test_processes_are_counted_while_they_live(tmp_path: Path) -> None:
    """A lock belongs to an open file, so that another one in this process stands for another process."""
    own = Claims(tmp_path)
    assert own.processes() == 1
    other = (tmp_path / ".claims" / "process-1").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    assert own.processes() == 2
    other.close()
    assert own.processes() == 1
    assert not (tmp_path / ".claims" / "process-1").exists(), "what a dead process left is removed"


def test_rates_hold_for_as_many_processes_only(values: Values, tmp_path: Path) -> None:
    machine = Machine()
    (job, *_) = jobs_in(values(seeds=[0]), tmp_path)
    record = machine.execute(job, Visit(None, machine.clock), split=False)
    assert Pace([record], "fake").seconds("small", "plain", 100) is not None
    assert Pace([record | {"processes": 3}], "fake").seconds("small", "plain", 100) is None
    assert Pace([record | {"processes": 3}], "fake", processes=3).seconds("small", "plain", 100) is not None


def test_what_several_add_at_once_is_all_there(tmp_path: Path) -> None:
    """Reading and writing are one act; without the lock the later writer would drop the other's records."""
    place = {"study": "s", "variant": "v", "budget": "b", "data": {"mark": ""}, "status": "finished"}

    def add(seed: int) -> None:
        Ledger(tmp_path).add("s", [place | {"seed": seed, "fingerprint": str(seed)}])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(60)))
    assert len(Ledger(tmp_path).read("s")) == 60
