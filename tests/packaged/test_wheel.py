"""The wheel, built and tried in an environment of its own outside the checkout: what comes along is found, and runs.

The environment has nothing of FathomLM but the wheel. What FathomLM requires comes from the environment of the tests, by a
path file: those are gigabytes that would be the same again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
READY = 300
"""Seconds for a server to load a small model, on a machine that does other things too."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--quiet", "--wheel-dir", str(place), str(ROOT)], check=True)
    (found,) = place.glob("fathomlm-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of the environment in an empty directory."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place / "env", with_pip=False)
    libraries = next((place / "env").glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(place / "env")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (libraries / "required.pth").write_text("".join(f"{path}\n" for path in beside))
    (place / "work").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FATHOMLM"))}

    def run(program: str, *words: str, start: bool = False) -> Any:
        command = [str(place / "env" / "bin" / program), *words]
        how: dict[str, Any] = {"cwd": place / "work", "env": clean | {"OMP_NUM_THREADS": "1"}, "text": True}
        if start:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
        return subprocess.run(command, capture_output=True, check=True, **how)

    return run


def test_the_wheel_holds_what_comes_along(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = ROOT / "src" / "fathomlm" / "packaged"
    wanted = {
        f"fathomlm/packaged/{file.relative_to(packaged)}"
        for kind in ("models", "exits", "texts")
        for file in (packaged / kind).rglob("*")
        if file.is_file()
    }
    wanted |= {f"fathomlm/recipes/{file.relative_to(ROOT / 'recipes')}" for file in (ROOT / "recipes").rglob("*.yaml")}
    wanted |= {f"fathomlm/serve/static/{file.name}" for file in (ROOT / "src/fathomlm/serve/static").iterdir()}
    assert wanted <= names
    assert "fathomlm/py.typed" in names
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/")) for name in names)


def test_it_is_imported_from_its_own_environment(installed: Callable[..., Any]) -> None:
    found = installed(
        "python", "-c", "import fathomlm; print(fathomlm.__file__, fathomlm.load('fathom-mor-23m').plan.layout)"
    )
    place, layout = found.stdout.split()
    assert "/env/lib/python" in place
    assert layout == "1+4+1"


def test_models_and_recipes_are_found(installed: Callable[..., Any]) -> None:
    assert "/env/lib/python" in json.loads(installed("fathomlm", "get", "fathom-mor-23m", "--json").stdout)["path"]
    recipes = json.loads(installed("fathomlm", "train", "--list", "--json").stdout)
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} == set(recipes)
    studies = installed("fathomlm", "study", "list").stdout
    assert all(path.stem in studies for path in (ROOT / "recipes" / "studies").glob("*.yaml"))


def test_the_demo_runs(installed: Callable[..., Any]) -> None:
    record = json.loads(installed("fathomlm", "demo", "--tokens", "4", "--json").stdout)
    assert record["model"] == "fathom-mor-23m"
    assert all(text["text"] for text in record["texts"])


def test_tiny_is_trained(installed: Callable[..., Any]) -> None:
    words = ("--budget.steps", "3", "--schedule.warmup", "1", "--batch.sequences", "2", "--evaluate.rows", "2", "--json")
    summary = json.loads(installed("fathomlm", "train", "tiny", *words).stdout)
    assert (summary["finished"], summary["steps"], summary["directory"]) == (True, 3, "runs/tiny")
    said = installed("fathomlm", "generate", "runs/tiny/last", "-p", "The ", "--max-new-tokens", "4", "--json")
    assert len(json.loads(said.stdout)["results"][0]["tokens"]) == 4


def test_the_server_answers(installed: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = installed("fathomlm", "serve", "--port", str(port), start=True)
    try:
        _wait(f"http://127.0.0.1:{port}/ready", server)
        body = json.dumps({"model": "fathom-mor-23m", "prompt": "The sea", "max_tokens": 3}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=READY) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=READY) as page:
            assert b"<html" in page.read()
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(address: str, server: Any) -> None:
    until = time.monotonic() + READY
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"{address} was never ready")
