"""Python programs in processes of their own that start at once: each is forked from a process that has already imported
torch and what the commands need, which takes some ten seconds. Signals, kills, limits and exit codes are real ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    "fathomlm.cli.main", "fathomlm.checkpoints.convert", "fathomlm.checkpoints.export", "fathomlm.checkpoints.resolve",
    "fathomlm.model", "fathomlm.serve.server", "fathomlm.train.run", "fathomlm.train.data.prepare",
)  # fmt: skip
CONTEXT.set_forkserver_preload([__name__, *PRELOADED])


def fork_server_here() -> None:
    """Make the process that programs are forked from a fork of this one, which has imported most of that already. To be
    called before anything has run that starts threads: a fork has none of them, and what they hold it never gets. Nothing is
    done where that is unsafe: a GPU that this process has asked for cannot be used by its forks, nor can much on macOS."""
    if sys.platform != "linux" or torch.cuda.is_available():
        return

    def fork(path: str, arguments: list[str], handles: list[int]) -> int:
        if child := os.fork():
            return child
        try:
            util.spawnv_passfds = spawn
            for handle in map(int, os.listdir("/proc/self/fd")):
                if handle > 2 and handle not in handles:
                    with suppress(OSError):
                        os.close(handle)
            exec(arguments[-1], {})
        finally:
            os._exit(1)

    resource_tracker.ensure_running()
    spawn = util.spawnv_passfds
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


class Forked:
    """A running program, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, script: str, *arguments: str, new_session: bool = False) -> None:
        """`script` runs as `python -c script arguments` would, in the directory and environment of this process."""
        (out, its_out), (err, its_err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        given = (script, [str(each) for each in arguments], Path.cwd(), dict(os.environ), new_session, its_out, its_err)
        self._process = CONTEXT.Process(target=_run, args=given)
        self._process.start()
        its_out.close()
        its_err.close()
        self.stdout, self.stderr = (open(os.dup(end.fileno()), encoding="utf-8") for end in (out, err))  # noqa: SIM115
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of `subprocess`: negative where a signal ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """All that it printed and said, once it has ended."""
        with ThreadPoolExecutor(2) as threads:
            printed, said = threads.map(lambda end: end.read(), (self.stdout, self.stderr))
        self._process.join()
        return printed, said

    def close(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()


def _run(
    script: str, arguments: list[str], cwd: Path, environment: dict[str, str], session: bool, *ends: Connection
) -> None:
    if session:
        os.setsid()
    for number, end in enumerate(ends, 1):
        os.dup2(end.fileno(), number)
        end.close()
    # Of its own, since pytest's may still be there.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    sys.argv = ["-c", *arguments]
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(script, vars(program))
