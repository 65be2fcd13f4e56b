"""What a model brings that is run: its chat template and its tokenizer's rules. Both are tried or run in a process of their
own, under limits on memory and CPU time, because neither can be bounded by looking at it: a template is a program.

A template is rendered there each time, by one process that stays. A tokenizer is too much in use for that: it is tried there
once before it is loaded here, on samples, and refused where its rules may make a text very much longer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.confined.worker import MAX_TEXT
from fathomlm.errors import CheckpointError, FathomError

RENDER_MEMORY, RENDER_CPU = 512 << 20, 5
"""Bytes of address space, and CPU seconds for one conversation; usual templates take a millisecond."""
TOKENIZER_MEMORY, TOKENIZER_CPU = 8 << 30, 30
"""The largest public tokenizers take 1 GB and 3 s."""
MAX_TOKENIZER = 256 << 20
"""Bytes of a tokenizer.json; the largest public ones have 35 MB."""
WALL = 120.0
"""Seconds after which a process that does not answer is given up, however little CPU time it was given."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class Refused(Exception):
    """The task failed in the process; the message says why, in one line."""


class Confined:
    """A process that does one task after another, started when it is first needed and again after it was ended."""

    def __init__(self, memory: int, cpu: int) -> None:
        self._memory, self._cpu = memory, cpu
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, task: Mapping[str, Any]) -> str:
        """The task's text, or `Refused`."""
        with self._lock:
            self.send(task)
            return self.answer()

    def send(self, task: Mapping[str, Any]) -> None:
        """Begin a task; `answer` waits for it."""
        data = json.dumps(task, default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone, and `answer` says so

    def answer(self) -> str:
        line = self._line()
        if line is None:
            raise Refused(self._ended())
        found = json.loads(line)
        if "error" in found:
            raise Refused(found["error"])
        return str(found["text"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _start(self) -> None:
        self.close()
        script = Path(__file__).with_name("worker.py")
        command = [sys.executable, "-P", str(script), str(self._memory), str(self._cpu)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(f"no process can be started for it: {error.strerror or error}") from error
        self._owner = os.getpid()

    def _line(self) -> bytes | None:
        """The next line; None where the process ended, wrote too much or nothing."""
        assert self._process is not None
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        parts: list[bytes] = []
        size, ends = 0, time.monotonic() + WALL
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            while selector.select(ends - time.monotonic()) and (part := os.read(handle, 1 << 16)):
                parts.append(part)
                size += len(part)
                if part.endswith(b"\n"):
                    return b"".join(parts)
                if size > 12 * MAX_TEXT + 1000:  # a character is at most twelve bytes of JSON
                    break
        return None

    def _ended(self) -> str:
        """Why there was no answer."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        self.close()
        if code is None:
            return "it gave no answer"
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"it ran for more than {self._cpu} s"
        name = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"it requires more than {self._memory >> 20} MiB of memory, or crashed ({name})"


@functools.cache
def _renderer() -> Confined:
    """One for all templates."""
    process = Confined(RENDER_MEMORY, RENDER_CPU)
    atexit.register(process.close)
    return process


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_last: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """A conversation in a tokenizer's chat format, as `apply_chat_template(..., tokenize=False)` gives it; under limits.

    `continue_last` ends the text within the last message, to be continued. `tools` are functions for templates that describe
    some. Raises `Refused`.
    """
    chat = [dict(message) for message in messages]
    if not chat:
        raise Refused("there is no message")
    last = str(chat[-1].get("content"))
    if continue_last:
        chat[-1]["content"] = last + _TAG
    values = {**tokenizer.special_tokens_map, "messages": chat, "tools": tools, "documents": None}
    values["add_generation_prompt"] = add_generation_prompt
    text = _renderer().ask({"task": "render", "template": tokenizer.get_chat_template(), "values": values})
    if not continue_last:
        return text
    at = text.rfind(_TAG.strip())
    if at < 0 or last.strip() not in text:
        raise Refused("it leaves out the last message, which is to be continued")
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()


class TokenizerTrial:
    """A tokenizer.json that is being tried. It runs beside what else there is to do; `check` waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.stat().st_size > MAX_TOKENIZER:
                raise CheckpointError(f"{path} has more than {MAX_TOKENIZER:,} bytes, the most that is read of such a file")
            self._digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        self._process: Confined | None = None
        if self._digest not in _passed():
            self._process = Confined(TOKENIZER_MEMORY, TOKENIZER_CPU)
            self._process.send({"task": "tokenizer", "path": str(path.resolve())})

    def check(self) -> None:
        """Raises where the tokenizer did not pass."""
        if self._process is None:
            return
        try:
            self._process.answer()
        except Refused as error:
            raise CheckpointError(f"{self._path}: the tokenizer cannot be read ({error})") from error
        finally:
            self._process.close()
        _passed().add(self._digest)


@functools.cache
def _passed() -> set[str]:
    """Checksums of the files that were tried in this process: loading a model again costs nothing."""
    return set()


@contextlib.contextmanager
def no_panic(where: str, error: type[FathomError] = CheckpointError) -> Iterator[None]:
    """The tokenizers library fails in some rules with a BaseException, which nothing else would catch."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise error(f"{where}: the tokenizer failed ({' '.join(str(problem).split())[:200]})") from None
