"""Signals at moments when a library does not expect them."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.interrupts import AGAIN, interrupt, no_interrupts

CARELESS = """
import signal, time
try:
    signal.raise_signal(signal.{name})
    for _ in range(20):
        time.sleep(0.01)
except KeyboardInterrupt:
    pass  # swallowed: it would do nothing
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_waits_for_the_end_of_an_import(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(number, interrupt)
    name = f"careless_about_{number.name}"
    (tmp_path / f"{name}.py").write_text(CARELESS.format(name=number.name), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def work() -> None:
        importlib.import_module(name)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert name in sys.modules, "imported to the end"


@pytest.mark.parametrize("number", SIGNALS)
def test_within_no_interrupts_they_wait_also_where_another_thread_takes_them(number: signal.Signals) -> None:
    """The system gives a process's signal to any thread that does not block it, as those of libraries do not."""
    signal.signal(number, interrupt)
    over, done = threading.Event(), []
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()
    here, there = os.pipe()
    os.set_blocking(there, False)
    before = signal.set_wakeup_fd(there)

    def work() -> None:
        with no_interrupts(), no_interrupts():
            os.kill(os.getpid(), number)
            os.read(here, 1)  # some thread has taken it
            for _ in range(1000):
                done.append(len(done))
        time.sleep(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.set_wakeup_fd(before)
        os.close(here)
        os.close(there)
        over.set()
        other.join()
    assert len(done) == 1000
    assert signal.getsignal(number) is interrupt
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_an_interrupt_while_handlers_are_put_back_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    put = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        before = put(number, handler)
        if number == signal.SIGINT and handler is interrupt:
            signal.raise_signal(signal.SIGINT)
        return before

    for number in SIGNALS:
        signal.signal(number, interrupt)
    monkeypatch.setattr("fathomlm.interrupts.signal.signal", interrupted)
    with pytest.raises(KeyboardInterrupt), no_interrupts():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == [interrupt, interrupt]


def test_of_both_signals_the_one_that_ends_counts() -> None:
    heard: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: heard.append(number))
    with no_interrupts():
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(0)
        heard.append(0)
    assert heard == [0, signal.SIGTERM]


def test_what_ignores_interrupts_goes_on_doing_so_within_no_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with no_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "and what is begun here inherits it"
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_elsewhere_an_interrupt_comes_at_once() -> None:
    signal.signal(signal.SIGINT, interrupt)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("before", "answered"), [(signal.default_int_handler, True), (signal.SIG_IGN, False)])
def test_commands_ask_for_it_while_they_run_and_leave_alone_what_ignores_interrupts(
    before: Any, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("fathomlm.cli.main.check_first", lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, before)
    assert main(["inspect", "smollm2-135m", "--json"]) == 0
    assert len(seen) == 1
    assert (seen[0] is not before) is answered
    assert signal.getsignal(signal.SIGINT) is before


TWICE = """
import atexit, os, signal, sys, threading
from fathomlm.cli import main as cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def send(*_):
    signal.raise_signal(signal.SIGINT)

def wait(options):
    try:
        send()
    finally:
        if place == "cleaning":
            send()
        print("cleaned up", flush=True)

class Sending:
    def __init__(self, to):
        self.to = to
    def write(self, text):
        send()
        return self.to.write(text)
    def flush(self):
        self.to.flush()

place, sys.argv[1:] = sys.argv[1], ["inspect", "smollm2-135m"]
cli.check_first = wait
if place == "saying":
    sys.stderr = Sending(sys.stderr)
if place == "exiting":
    atexit.register(send)
if place == "threads":
    threading._register_atexit(send)
sys.exit(cli.main())
"""


@pytest.mark.parametrize("place", ["cleaning", "saying", "exiting", "threads"])
def test_a_second_interrupt_changes_nothing(place: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE, place], capture_output=True, text=True, check=False)
    assert ended.stderr == "fathomlm: interrupted; nothing was left half-written\n"
    assert (ended.returncode, ended.stdout) == (2, "cleaned up\n")


def test_however_many_interrupts_come_one_line_is_said() -> None:
    """Sent from outside, from the moment that the command runs until the process is gone. Those that come while it is not
    scheduled are one to it, so a busy machine makes them fewer and never faster."""
    script = (
        "import signal, sys, time\n"
        "from fathomlm.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "def wait(options):\n"
        "    print('running', flush=True)\n"
        "    while True:\n        time.sleep(0.01)\n"
        "cli.check_first = wait\n"
        "sys.argv[1:] = ['inspect', 'smollm2-135m']\n"
        "sys.exit(cli.main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        _, said = process.communicate()
    assert said == b"fathomlm: interrupted; nothing was left half-written\n"
    assert process.returncode == 2


def test_interrupts_that_wait_for_an_import_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, interrupt)
    many = "for _ in range(50):\n    signal.raise_signal(signal.SIGINT)\n"
    many = f"import signal, threading\n{many}alive = threading.active_count()\n"
    before = threading.active_count()
    (tmp_path / "many_signals.py").write_text(many, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        _import_and_wait("many_signals")
    assert sys.modules["many_signals"].alive <= before + 1
    time.sleep(3 * AGAIN)  # a second one would come here


def _import_and_wait(name: str) -> None:
    importlib.import_module(name)
    time.sleep(60)


def test_what_cleans_up_too_long_is_interrupted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, interrupt)

    def clean() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            seen.append("patient")
            monkeypatch.setattr("fathomlm.interrupts.PATIENCE", 0.0)
            signal.raise_signal(signal.SIGINT)
            seen.append("not reached")

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        clean()
    assert seen == ["patient"]
