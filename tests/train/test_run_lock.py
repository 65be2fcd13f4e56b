"""One run at a time in a directory, whatever became of the one before."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
from contextlib import contextmanager

import pytest
import torch

from fathomlm.cli.main import main
from fathomlm.errors import OutputError, TrainingError
from fathomlm.train import directory as lock_module
from fathomlm.train.directory import run_lock
from fathomlm.train.distributed import World
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import train
from interrupting import interrupted_everywhere

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = World(0, 1, torch.device("cpu"))
HOST = socket.gethostname()


class Waits(SilentWatcher):
    """Says when a step is done, and goes on when it is told to."""

    def __init__(self, step, said, told):
        self._at, self._said, self._told = step, said, told

    def step(self, step, total, live):
        if step == self._at:
            os.write(self._said, b"x")
            os.read(self._told, 1)


@contextmanager
def running(recipe, step, **more):
    """The same run in another process, which has done a step and waits. Gives its process and a function that lets go."""
    heard, said = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(recipe, watcher=Waits(step, said, told), **more)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(said)
    assert os.read(heard, 1) == b"x", "the other run ended before its step"
    waited = []

    def end(number=None):
        if waited:
            return waited[0]
        if number is None:
            os.write(tell, b"x")
        else:
            os.kill(child, number)
        waited.append(os.waitpid(child, 0)[1])
        return waited[0]

    try:
        yield child, end
    finally:
        end(signal.SIGKILL)
        for handle in (heard, told, tell):
            os.close(handle)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_directory_is_refused(resume, recipe, tmp_path):
    """Before there was a lock, both trained, and the records of one were lost."""
    made = recipe(checkpoint={"every": 2})
    with running(made, 3, resume=True) as (other, end):
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        words = rf"{tmp_path}/run is in use by another run \(process {other} on {re.escape(HOST)}\)"
        with pytest.raises(TrainingError, match=words):
            train(made, resume=resume)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
        assert end() == 0
    assert [r["step"] for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run/.lock").exists()
    assert train(made, resume=True).finished


def test_the_command_says_it_in_one_line_with_code_2(recipe, values, tmp_path, capsys):
    from fathomlm.train.reading import to_yaml

    made = recipe()
    (tmp_path / "recipe.yaml").write_text(to_yaml(made))
    with running(made, 1) as (other, _):
        assert main(["train", str(tmp_path / "recipe.yaml")]) == 2
        said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"(process {other} on {HOST})" in said


def test_a_run_that_was_killed_holds_nothing(recipe, tmp_path):
    made = recipe(checkpoint={"every": 2})
    with running(made, 3) as (other, end):
        end(signal.SIGKILL)
    assert (tmp_path / "run/.lock").read_text() == f"{other} {HOST}\n"
    assert train(made, resume=True).finished
    assert not (tmp_path / "run/.lock").exists()


def test_a_directory_that_came_to_nothing_goes_again(tmp_path):
    with run_lock(tmp_path / "a/b", CPU, print):
        assert (tmp_path / "a/b/.lock").exists()
    assert not (tmp_path / "a").exists()
    with run_lock(tmp_path / "a/b", CPU, print):
        (tmp_path / "a/b/file").touch()
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["file"]


def test_a_lock_that_could_not_be_taken_leaves_nothing(tmp_path, monkeypatch):
    def hold():
        with run_lock(tmp_path / "a/b", CPU, print):
            pass

    stopped = 0
    for _ in interrupted_everywhere(hold, lock_module, ("_take", "_lock")):
        assert not (tmp_path / "a").exists()
        stopped += 1
    assert stopped > 8

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left"):
        hold()
    assert not (tmp_path / "a").exists()


def test_only_the_first_rank_locks(tmp_path, monkeypatch):
    other = World(1, 2, torch.device("cpu"))
    monkeypatch.setattr(World, "broadcast", lambda self, value: (None, 3) if self.size > 1 else value)
    with run_lock(tmp_path / "run", CPU, print), run_lock(tmp_path / "run", other, print):
        assert (tmp_path / "run/.lock").exists()
    monkeypatch.setattr(World, "broadcast", lambda self, value: (TrainingError("the first rank's words"), None))
    with pytest.raises(TrainingError, match="the first rank's words"), run_lock(tmp_path / "other", other, print):
        pass
    assert not (tmp_path / "other").exists()


def test_a_file_that_its_holder_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Opened before the holder removed it, locked after: the lock is then of a file that nobody else will ever open."""
    (tmp_path / ".lock").write_text("1 elsewhere\n")
    flock, opened = fcntl.flock, []

    def late(handle, how):
        opened.append(os.fstat(handle).st_ino)
        if len(opened) == 1:
            (tmp_path / ".lock").rename(tmp_path / "removed")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with run_lock(tmp_path, CPU, print):
        assert (tmp_path / ".lock").stat().st_ino == opened[1] != opened[0]


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_a_file_system_without_locks(tmp_path):
    said = []
    with run_lock(tmp_path / "run", CPU, said.append):
        (note,) = said
        assert note.startswith(f"{tmp_path}/run is on a file system without locks (No locks available)")
        words = rf"in use by another run \(process {os.getpid()} on .*\); if it is gone, delete {tmp_path}/run/\.lock"
        with pytest.raises(TrainingError, match=words), run_lock(tmp_path / "run", CPU, print):
            pass
    assert not (tmp_path / "run").exists()
    (tmp_path / ".lock").write_text("7 another-host\n")
    with pytest.raises(TrainingError, match=r"process 7 on another-host"), run_lock(tmp_path, CPU, print):
        pass
    for stale in (f"999999999 {HOST}\n", "", "\x00\x00", "x y z"):
        (tmp_path / ".lock").write_text(stale)
        with run_lock(tmp_path, CPU, print):
            pass


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(lock_module, "make_directories", refuse)
    refused = pytest.raises(OutputError, match=rf"cannot write {tmp_path}: Read-only file system")
    with refused, run_lock(tmp_path, CPU, print):
        pass
