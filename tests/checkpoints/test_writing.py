"""Directories and files appear whole or not at all, whenever the work is stopped."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fathomlm.checkpoints import writing
from fathomlm.checkpoints.writing import whole_directory, whole_file
from fathomlm.errors import OutputError
from interrupting import interrupted_everywhere

MODEL = '{"model_type": "fathom"}'


def write_model(out: Path, weights: str, *, force: bool = False) -> None:
    with whole_directory(out, force) as directory:
        (directory / "config.json").write_text(MODEL)
        (directory / "weights").mkdir()
        (directory / "weights/first").write_text(weights)
        (directory / "weights/second").write_text(weights)


def contents(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def model_of(weights: str, name: str = "m") -> dict[str, str]:
    return {f"{name}/config.json": MODEL, f"{name}/weights/first": weights, f"{name}/weights/second": weights}


@pytest.fixture
def gone() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_an_interrupt_before_any_line_leaves_a_new_directory_whole_or_nothing(tmp_path: Path) -> None:
    whole = nothing = 0
    for _ in interrupted_everywhere(lambda: write_model(tmp_path / "deep/er/m", "new"), writing):
        if list(tmp_path.iterdir()):
            assert contents(tmp_path) == model_of("new", "deep/er/m")
            whole += 1
        else:
            nothing += 1
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)
    assert whole > 3
    assert nothing > 40


def test_an_interrupt_before_any_line_of_a_replacement_leaves_one_of_the_two(tmp_path: Path) -> None:
    """And no other beside it under a hidden name, as large as it."""
    before, after = [], []
    write_model(tmp_path / "m", "old")
    for _ in interrupted_everywhere(lambda: write_model(tmp_path / "m", "new", force=True), writing):
        assert os.listdir(tmp_path) == ["m"]
        (before if contents(tmp_path) == model_of("old") else after).append(contents(tmp_path))
        write_model(tmp_path / "m", "old", force=True)
    assert len(before) > 40
    assert len(after) > 5
    assert all(left == model_of("new") for left in after)


def test_an_interrupt_before_any_line_leaves_one_of_two_files(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "f") as temporary:
            temporary.write_text("new")

    found = []
    (tmp_path / "f").write_text("old")
    for _ in interrupted_everywhere(write, writing):
        assert os.listdir(tmp_path) == ["f"]
        found.append((tmp_path / "f").read_text())
        (tmp_path / "f").write_text("old")
    assert set(found) == {"old", "new"}


def test_a_process_that_is_killed_while_it_deletes_the_old_one_leaves_nothing_to_be_taken_for_it(
    tmp_path: Path, start_python
) -> None:
    """Somebody deletes the new one too, and writes a third: half of the first one is not in its way."""
    write_model(tmp_path / "m", "old")
    script = (
        "import os, shutil, signal, sys\n"
        "from pathlib import Path\n"
        "from fathomlm.checkpoints import writing\n"
        "remove = shutil.rmtree\n"
        "def half(path, **more):\n"
        "    if (Path(path) / 'weights/first').exists():\n"
        "        (Path(path) / 'weights/first').unlink()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "shutil.rmtree = half\n"
        f"with writing.whole_directory(Path({str(tmp_path / 'm')!r}), True) as directory:\n"
        f"    (directory / 'config.json').write_text({MODEL!r})\n"
    )
    writer = start_python(script)
    writer.communicate()
    assert contents(tmp_path)["m/config.json"] == MODEL
    assert len(os.listdir(tmp_path)) == 2
    shutil.rmtree(tmp_path / "m")
    write_model(tmp_path / "m", "new")
    assert contents(tmp_path) == model_of("new")


def test_a_disk_that_is_full_when_the_tokenizer_is_written(tmp_path: Path) -> None:
    """The tokenizers library raises a bare `Exception`, with what the system said in its text."""
    place = tmp_path / "deep/m"
    with pytest.raises(OutputError) as refused, whole_directory(place, False):
        raise Exception("No space left on device (os error 28)")
    assert str(refused.value) == f"cannot write {place}: No space left on device (os error 28); nothing was left behind"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Exception, match="a bug") as bug, whole_directory(place, False):
        raise Exception("a bug")
    assert type(bug.value) is Exception


def test_a_file_that_cannot_be_written_is_told_by_the_name_that_it_would_have(tmp_path: Path) -> None:
    def write() -> None:
        with whole_directory(tmp_path / "m", False) as directory, whole_file(directory / "plot.png"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError) as refused:
        write()
    assert str(refused.value) == f"cannot write {tmp_path / 'm' / 'plot.png'}: No space left on device"


@pytest.mark.parametrize("name", ["m", "m[1]", "a*b?", "ein Modell ✓"])
def test_what_a_killed_process_left_is_found_whatever_the_name(name: str, tmp_path: Path, gone: int) -> None:
    write_model(tmp_path / f".{name}.replaced-{gone}", "old")
    (tmp_path / f".{name}.partial-{gone}").mkdir()
    with pytest.raises(OutputError, match="exists"):
        write_model(tmp_path / name, "new")
    assert contents(tmp_path / name) == {key.removeprefix("m/"): value for key, value in model_of("old").items()}
    write_model(tmp_path / name, "new", force=True)
    assert contents(tmp_path) == model_of("new", name)
    assert os.listdir(tmp_path) == [name]
