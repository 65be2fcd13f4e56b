"""What commands say of a model that came with the package, by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fathomlm.cli.main import main


def test_an_unknown_name_is_answered_with_the_packaged_ones(packaged: str, mistake_of: Callable[..., str]) -> None:
    for verb in (("get",), ("inspect",), ("generate", "-p", "x"), ("demo",)):
        assert "unknown model 'xyz'; known: " in mistake_of(*verb, "xyz")
        assert f" {packaged}," in mistake_of(*verb, "xyz") + ","
        assert f"did you mean '{packaged}'?" in mistake_of(*verb, "tiny-more")


def test_get_says_that_nothing_has_to_be_fetched(
    packaged: str, packaged_models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", packaged]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{packaged} ships with FathomLM; nothing to download: {packaged_models_dir / packaged}\n")
    assert main(["get", packaged, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in (packaged_models_dir / packaged).iterdir())
    assert (record["downloaded"], record["path"], record["bytes"]) == (False, str(packaged_models_dir / packaged), size)
    assert record["licence"].endswith("README.md")


def test_inspect_counts_it(packaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", packaged, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["sharing"], record["recursions"]) == (packaged, "middle-cycle", 3)
    assert (record["router"], record["layout"]) == ("expert", "1+2+1")
