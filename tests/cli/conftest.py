from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.configuration_utils  # noqa: F401  its log writes to what stderr is now, not to one test's

from fathomlm.cli.main import main


@pytest.fixture(autouse=True)
def _not_drawn(request: pytest.FixtureRequest) -> None:
    """What most pictures show is tested in tests/lab; tests of the others ask for `coarse_figures`."""
    if "coarse_figures" not in request.fixturenames:
        request.getfixturevalue("blank_figures")


@pytest.fixture
def mistake_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `fathomlm VERB ...`, which must fail in one line on standard error, and give back that line."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("fathomlm: ")
        assert captured.err.count("\n") == 1
        return captured.err.strip()

    return run


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The record of a command that must succeed."""

    def run(*words: str | Path) -> Any:
        assert main([*(str(word) for word in words), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of the named workloads, but with fewer tokens."""
    from fathomlm.lab.bench import workload

    shapes = {"thesis": (1, 16), "512-2048": (40, 12), "64-256": (9, 10)}
    for name, (prompt, new) in shapes.items():
        old = workload.WORKLOADS[name]
        spread = new / 4 if old.deviation else 0.0
        monkeypatch.setitem(
            workload.WORKLOADS, name, workload.WorkloadShape(prompt=prompt, new=new, deviation=spread, requests=old.requests)
        )
