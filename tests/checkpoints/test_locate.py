"""Names and paths that lead nowhere: what is said, and what was probably meant."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints import locate as locating
from fathomlm.checkpoints.locate import check_source, locate
from fathomlm.cli.main import main
from fathomlm.errors import ModelNotFound


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models in the current directory, and a hub that has none."""
    for directory in ("looped", "runs/tiny/last"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "config.json").write_text("{}")
    (tmp_path / "small.gguf").write_text("GGUF")
    monkeypatch.chdir(tmp_path)

    def nothing(repo_id: str, **_: object) -> Path:
        raise ModelNotFound(f"the hub has no model {repo_id}")

    monkeypatch.setattr(locating, "hub_config", nothing)
    monkeypatch.setattr(locating, "hub_snapshot", nothing)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("loopd", "unknown model 'loopd' (did you mean 'looped'?)"),
        ("./loopd", "./loopd does not exist (did you mean 'looped'?)"),
        ("smal.gguf", "smal.gguf does not exist (did you mean 'small.gguf'?)"),
        ("run/tiny/last", "run/tiny/last does not exist (did you mean 'runs/tiny/last'?)"),
        ("runs/tin/last", "runs/tin/last does not exist (did you mean 'runs/tiny/last'?)"),
        ("runs/tin", "the hub has no model runs/tin; nor is there a directory runs/tin (did you mean 'runs/tiny'?)"),
        ("owner/name", "the hub has no model owner/name; nor is there a directory owner/name"),
        ("nowhere/at/all", "nowhere/at/all does not exist"),
        ("", "the model's name is empty"),
        (" ", "the model's name is empty"),
        ("https://huggingface.co/owner/name", "is a page of the hub; its model is owner/name"),
        ("hf.co/owner/name/tree/main", "is a page of the hub; its model is owner/name"),
    ],
)
def test_a_source_that_is_not_there(source: str, says: str) -> None:
    for find in (check_source, locate):
        with pytest.raises(ModelNotFound) as found:
            find(source)
        assert says in str(found.value)
        assert ("did you mean" in str(found.value)) == ("did you mean" in says)


def test_directories_that_may_not_be_read_suggest_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refused(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if "lost+found/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", refused)
    for source, says in (("loopd", "did you mean 'looped'"), ("run/tiny/last", "did you mean 'runs/tiny/last'")):
        with pytest.raises(ModelNotFound, match=says):
            check_source(source)
    assert main(["inspect", "lost+found/model"]) == 2, "one line, no traceback"


def test_a_preset_is_no_path() -> None:
    with pytest.raises(ModelNotFound) as found:
        check_source("gemma-2b")
    assert "directory" not in str(found.value)
