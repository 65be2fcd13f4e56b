"""Several processes that work off one queue, on one GPU or on several.

A process claims what it is going to make; others pass over it. Claims are the operating system's locks (flock) on small
files of the work directory, so that a process that was killed holds nothing. Budgets of one variant and seed are claimed
together: a larger one branches from the smaller one's checkpoint.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from fathomlm.errors import OutputError
from fathomlm.lab.study.jobs import Job
from fathomlm.lab.study.ledger import fingerprint


class Claims:
    """What this process has claimed, and how many processes there are; all of it ends with the process, or with `close`."""

    def __init__(self, work: Path) -> None:
        self._directory = work / ".claims"
        self._held: dict[str, int] = {}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write {self._directory}: {error.strerror or error}") from error
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
    return f"{fingerprint(job.shaped.recipe, without='budget')}-{job.mark}"


def _lock(path: Path) -> int | None:
    """A handle that holds the file's lock; None where another process does."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
