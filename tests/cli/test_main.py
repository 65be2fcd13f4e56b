"""What every command does before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fathomlm.cli.common import read_text
from fathomlm.cli.main import main, share_cores


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_unless_told_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever was there
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    share_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_name_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a prompt in place of a model."""
    assert main(["inspect", "Once upon a time " * 30]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fathomlm: Once upon a time")
    assert said.count("\n") == 1
    assert len(said) < 120


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "fathomlm", "inspect", "smollm2-135m", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "fathomlm: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("command", [["generate", "fathom-mor-23m", "-p", "-"], ["chat", "fathom-mor-23m"]])
def test_a_closed_standard_input_is_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(command) == 2
    assert capsys.readouterr().err == "fathomlm: standard input is closed\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`fathomlm study show tiny | head -0`, whose table rich prints."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fathomlm", "study", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_that_the_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a fathom is six feet " * 50)
    words = ["data", "prepare", "text.txt", "corpus-é", "--tokenizer", "bytes", "--validation-fraction", "0"]
    command, place = [sys.executable, "-m", "fathomlm", *words], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=place, cwd=tmp_path)
    assert (done.returncode, done.stdout[:10]) == (0, b"corpus-?: "), done.stderr


def test_a_prompt_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Once", encoding="utf-8-sig")
    assert read_text(file) == "Once"
