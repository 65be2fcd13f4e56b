"""A server that is told to stop stops in the time that it was given, whatever its engine and its clients do meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fathomlm.serve import served_model
from fathomlm.serve.options import ServeOptions
from faults.test_connections import dialled, request
from serve.serving import Running, running, until

pytestmark = pytest.mark.usefixtures("one_thread")


def told_to_stop(found: Running) -> None:
    found.server.servers[0].get_loop().call_soon_threadsafe(found.server.end)


def test_an_engine_in_the_middle_of_a_step_is_left_behind(tiny_model: Any) -> None:
    """Nothing ends the step before the server has gone."""
    go_on = threading.Event()
    with running(tiny_model, ServeOptions(drain_timeout=0.05)) as ending:
        step = ending.engine.step

        def waiting() -> None:
            assert go_on.wait(120)
            step()

        ending.engine.step = waiting  # type: ignore[method-assign]
        with dialled(ending, request(stream=True)) as raw:
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
            told_to_stop(ending)
            ending.thread.join(60)
            gone = not ending.thread.is_alive()
            go_on.set()
        assert gone
        assert ending.service.abandoned
    asyncio.run(ending.service.close())  # what the end of the process would do


def test_clients_that_do_not_read_do_not_hold_the_end_up(tiny_model: Any) -> None:
    """Nor do those that are half way through a request. All would otherwise have seconds of grace, one after another."""
    options = ServeOptions(drain_timeout=0.05, header_timeout=3600, body_timeout=3600, timeout=3600)
    with running(tiny_model, options) as ending, dialled(ending, b"GET /he"), dialled(ending, request()[:-5]):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with raw:
            host, port = ending.url.removeprefix("http://").split(":")
            raw.connect((host, int(port)))
            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 2000)
            until(lambda: len(ending.server.connections) >= 3)
            told_to_stop(ending)
            ending.thread.join(60)
            assert not ending.thread.is_alive()
        assert ending.server.config.timeout_graceful_shutdown < 1


def test_a_prompt_that_is_being_read_is_left_behind(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow(model: Any, prompt: Any) -> Any:
        begun.set()
        assert go_on.wait(120)
        return [1]

    monkeypatch.setattr(served_model, "encode_prompt", slow)
    with running(tiny_model, ServeOptions(drain_timeout=0.05)) as ending, dialled(ending, request()):
        assert begun.wait(60)
        told_to_stop(ending)
        ending.thread.join(60)
        gone = not ending.thread.is_alive()
        go_on.set()
        assert gone


@pytest.mark.slow
def test_the_process_ends_although_its_engine_does_not(tiny_model_dir: Path) -> None:
    """The command, with an engine that never finishes a step, and with a reader of prompts that never ends."""
    script = (
        "import threading, sys\n"
        "from fathomlm.engine.engine import Engine\n"
        "Engine.step = lambda self: threading.Event().wait()\n"
        "from fathomlm.serve import served_model\n"
        "encode = served_model.encode_prompt\n"
        "wait = threading.Event().wait\n"
        "served_model.encode_prompt = lambda model, prompt: encode(model, prompt) if prompt != 'x' else wait()\n"
        "from fathomlm.cli.main import main\n"
        f"sys.exit(main(['serve', {str(tiny_model_dir)!r}, '--port', '0', '--threads', '1', '--drain-timeout', '0.1']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    late = threading.Timer(240, process.kill)
    late.start()
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        url = next(line for line in process.stderr if " ready at " in line).split(" ready at ")[1].split()[0]
        host, port = url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            raw = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            raw.sendall(request(stream=True))
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
            other = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            other.sendall(request(prompt="x"))
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        said = [json.loads(line) for line in process.stdout]
        assert {"event": "drained", "complete": False}.items() <= next(
            one for one in said if one["event"] == "drained"
        ).items()
    finally:
        late.cancel()
        process.kill()
        process.wait()
