"""Signals at moments when a library does not expect them."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.interrupts import interrupt

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
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert name in sys.modules, "imported to the end"


def test_elsewhere_an_interrupt_comes_at_once() -> None:
    signal.signal(signal.SIGINT, interrupt)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("before", "within"), [(signal.default_int_handler, interrupt), (signal.SIG_IGN, signal.SIG_IGN)])
def test_commands_ask_for_it_while_they_run_and_leave_alone_what_ignores_interrupts(
    before: Any, within: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("fathomlm.cli.main.check_first", lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, before)
    assert main(["inspect", "smollm2-135m", "--json"]) == 0
    assert seen == [within]
    assert signal.getsignal(signal.SIGINT) is before
