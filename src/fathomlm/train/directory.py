"""A run's directory: its checkpoints, `last` and `best`, what a killed run may have left half-done, and the lock that keeps
two runs from writing over each other's records and removing each other's checkpoints.

`RUN/.lock` names the process that holds it. The lock itself is the operating system's (flock), which lets go of it however
the process ends, so that a run that was killed is never in the way. Where the file system has no such locks, what the file
says is all there is: it is believed while its process lives, and the user is told.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fathomlm.checkpoints.writing import is_alive, make_directories, remove_empty, whole_file
from fathomlm.errors import TrainingError, writing
from fathomlm.train.checkpoint import clean_up, point, prune, set_aside
from fathomlm.train.distributed import World
from fathomlm.train.reading import to_yaml
from fathomlm.train.recipe import Recipe
from fathomlm.train.state import saved_steps, step_name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run lives. Only its first rank writes here."""

    path: Path
    recipe: Recipe

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / step_name(step)

    def saved(self) -> dict[int, Path]:
        """The checkpoints, by step."""
        return saved_steps(self.checkpoints)

    def latest(self) -> str | None:
        saved = self.saved()
        return str(saved[max(saved)]) if saved else None

    def settle(self, best: int | None, damaged: Iterable[Path] = ()) -> None:
        """As a run needs it: made, or rid of what a killed run left half-done. Damaged checkpoints get other names, or they
        would count among those that are kept, and the run would meet them in its way."""
        with writing(self.path):
            make_directories(self.checkpoints)
            clean_up(self.checkpoints)
            for checkpoint in damaged:
                set_aside(checkpoint)
            for stale in (*self.path.glob(".*.partial-*"), *self.path.glob(".*.fresh-*")):
                stale.unlink()
        self.tidy(best)
        with whole_file(self.path / "recipe.yaml") as temporary:
            temporary.write_text(to_yaml(self.recipe), encoding="utf-8")

    def tidy(self, best: int | None) -> None:
        """Point `last` and `best` where they belong and remove what is not kept; a killed run may not have come to it."""
        recipe, saved = self.recipe.checkpoint, self.saved()
        with writing(self.path):
            if saved:
                point(self.path / "last", saved[max(saved)])
            if best is not None and best in saved:
                point(self.path / "best", saved[best])
            prune(self.checkpoints, recipe.keep, {*recipe.milestones} | ({best} if best is not None else set()))


NAME = ".lock"
TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def run_lock(directory: Path, world: World, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's directory, which is made where it is missing and goes again where nothing came into it. The
    first rank holds it for all; where it cannot, all ranks raise."""
    directory = directory.absolute()
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    handle: int | None = None
    try:
        handle = world.on_first(lambda: _take(directory, note))
        yield
    finally:
        if world.first:
            if handle is not None:
                with suppress(OSError):
                    (directory / NAME).unlink()
                os.close(handle)
            with suppress(OSError):
                remove_empty(made)


def _take(directory: Path, note: Callable[[str], None]) -> int:
    with writing(directory):
        return _taken(directory, note)


def _taken(directory: Path, note: Callable[[str], None]) -> int:
    make_directories(directory)
    path = directory / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, directory, note)
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(handle).st_ino:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed the file after we had opened it: there is another, or none, by now


def _lock(handle: int, directory: Path, note: Callable[[str], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(handle)
        if error.errno in TAKEN:
            who = "another process" if holder is None else f"process {holder[0]} on {holder[1]}"
            raise TrainingError(
                f"{directory} is in use by another run ({who}); wait for it or stop it, or name another directory with --out"
            ) from error
        if error.errno not in UNSUPPORTED:
            raise
        here = holder is not None and holder[1] == socket.gethostname()
        if holder is not None and (not here or is_alive(holder[0])):
            raise TrainingError(
                f"{directory} is in use by another run (process {holder[0]} on {holder[1]}); if it is gone, delete "
                f"{directory / NAME}, which this file system cannot lock"
            ) from error
        note(
            f"{directory} is on a file system without locks ({error.strerror}): another run that starts in the same moment "
            "would not be noticed"
        )


def _holder(handle: int) -> tuple[int, str] | None:
    """The process that the file names; None where it has not come to writing it."""
    words = os.pread(handle, 1024, 0).decode("utf-8", "replace").split()
    return (int(words[0]), words[1]) if len(words) == 2 and words[0].isdecimal() and len(words[0]) < 10 else None
