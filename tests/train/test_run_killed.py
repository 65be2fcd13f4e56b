"""Runs that are killed outright, at the worst moments and at any: resumed, they end as if nothing had been.

The run that is killed is a fork of the test, which has torch loaded already and can be made to kill itself at a
certain line; `tests/cli/test_train.py` kills the real command too.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from fathomlm.checkpoints import writing
from fathomlm.train import checkpoint as checkpoint_module
from fathomlm.train import directory as directory_module
from fathomlm.train import run as run_module
from fathomlm.train.checkpoint import load_checkpoint
from fathomlm.train.directory import point
from fathomlm.train.report import Reporter, SilentWatcher, read_records
from fathomlm.train.run import TrainingRun, train

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 12
CHANGES = {"budget": {"steps": STEPS}, "checkpoint": {"every": 3, "keep": 1}, "loss": {"exits": {"coefficient": 0.3}}}


def curve(directory):
    return [(r["kind"], r["step"], r["loss"], r["parts"]) for r in read_records(directory / "metrics.jsonl")]


def records_of(out):
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def die(*args: object, **more: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(count, then):
    """A function that does as `then` does, and dies in its `count`th call."""
    calls = iter(range(1, 10**9))

    def do(*args, **more):
        if next(calls) == count:
            die()
        return then(*args, **more)

    return do


class DieAfter(SilentWatcher):
    def __init__(self, step):
        self._at = step

    def step(self, step, total, live):
        if step == self._at:
            die()


class WaitsAtTheEnd(SilentWatcher):
    """A run that does not end before it is killed, however late that is."""

    def step(self, step, total, live):
        while step == total:
            signal.pause()


def while_saving():
    checkpoint_module.save_file = die_at(4, checkpoint_module.save_file)  # two files a checkpoint: in the second one


def between_writing_and_renaming():
    writing._swap = die_at(2, writing._swap)


def between_renaming_and_pointing():
    directory_module.point = die_at(3, directory_module.point)  # `last` and `best` at the first, `last` at the second


def at_the_last_checkpoint_before_pointing():
    directory_module.point = die_at(7, directory_module.point)


def while_removing_the_old():
    def half(path, **more):
        (Path(path) / "training/state.json").unlink()
        die()

    directory_module.shutil.rmtree = half


def in_the_middle_of_a_record():
    plain = Reporter.write

    def write(self, record):
        if record["step"] == 8:
            self._file.write('{"kind": "train", "step": 8, "loss": 3.')
            self._file.flush()
            die()
        plain(self, record)

    Reporter.write = write


def between_two_checkpoints():
    TrainingRun._is_due = die_at(8, TrainingRun._is_due)


MOMENTS = [
    while_saving,
    between_writing_and_renaming,
    between_renaming_and_pointing,
    at_the_last_checkpoint_before_pointing,
    while_removing_the_old,
    in_the_middle_of_a_record,
    between_two_checkpoints,
]


def start(work):
    """Do `work` in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def killed(child):
    """Whether it was, and did not end by itself; it must not have failed."""
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


@pytest.fixture(scope="module")
def whole(token_corpus, tmp_path_factory):
    """A function that gives the run that nobody killed, which is made once."""
    made = []

    def get(recipe):
        if not made:
            out = tmp_path_factory.mktemp("whole") / "run"
            train(recipe(**CHANGES, out=str(out)))
            made.append(out)
        return made[0]

    return get


def ended_alike(out, whole):
    assert curve(out) == curve(whole)
    for name in ("model.safetensors", "training/optimizer-00000-of-00001.safetensors", "training/random.safetensors"):
        assert (out / "last" / name).read_bytes() == (whole / "last" / name).read_bytes()
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
    assert sorted(os.listdir(out / "checkpoints")) == sorted(os.listdir(whole / "checkpoints"))
    assert (out / "best").resolve().name == (whole / "best").resolve().name
    return True


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_run_that_was_killed_at_a_bad_moment(moment, recipe, whole, tmp_path):
    made = recipe(**CHANGES)

    def work():
        moment()
        train(made)

    assert killed(start(work))
    out = tmp_path / "run"
    assert 0 < len(list((out / "checkpoints").glob("step-*"))) <= 3
    summary = train(made, resume=True)
    assert summary.finished
    assert ended_alike(out, whole(recipe))


def test_a_run_that_was_killed_again_and_again_at_any_moment(recipe, whole, tmp_path):
    made = recipe(**CHANGES)
    draw, out, kills = random.Random(0), tmp_path / "run", 0
    for records in (1, 4, 6, 9, 11, 13):  # a run makes 16: killed somewhere behind these
        child = start(lambda: train(made, resume=True, watcher=WaitsAtTheEnd()))
        while len(records_of(out)) < records:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        kills += killed(child)
    assert kills == 6
    train(made, resume=True)
    assert ended_alike(out, whole(recipe))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(recipe, whole, tmp_path):
    made = recipe(**CHANGES)
    assert killed(start(lambda: train(made, watcher=DieAfter(2))))
    assert len(curve(tmp_path / "run")) == 2
    train(made)  # there is nothing to lose, so --resume is not asked for
    assert ended_alike(tmp_path / "run", whole(recipe))


def test_the_kills_above_do_not_reach_this_process():
    assert run_module.load_checkpoint is load_checkpoint
    assert directory_module.point is point
