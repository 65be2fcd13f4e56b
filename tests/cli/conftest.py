from __future__ import annotations

from collections.abc import Callable

import pytest

from fathomlm.cli.main import main


@pytest.fixture(autouse=True)
def _coarse(coarse_figures: None) -> None:
    """What the pictures show is tested in tests/lab."""


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
