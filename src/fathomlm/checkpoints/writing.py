"""Directories and files appear whole or not at all: written under a temporary name beside the target, put on the disk, then
renamed. What has its name outlasts a power cut.

A file system may write names before contents, and either of them long after the call that made them returned. A rename
therefore is a promise only in this order: contents synced, directories of the new tree synced, rename, parent synced.
Everything that FathomLM keeps goes through here.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fathomlm.errors import OutputError

UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
"""What file systems answer that cannot sync a directory; there is nothing more to be done on them."""
THRESHOLD = "threshold.json"
"""A calibrated threshold, beside the exits that it was calibrated for."""


def sync_file(path: Path) -> None:
    """Wait until a file's contents are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk: those that were made, renamed and removed."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Wait until a directory is on the disk with all that is in it."""
    for place, _, files in os.walk(path, topdown=False):
        for name in files:
            if not os.path.islink(file := Path(place, name)):
                sync_file(file)
        sync_directory(Path(place))


def make_directories(path: Path) -> list[Path]:
    """Make a directory with its parents, for good. Those that were missing are returned, innermost first."""
    path = path.absolute()
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in made:
        sync_directory(place.parent)
    return made


def checksum(path: Path) -> str:
    """The BLAKE2b of a file in 256 bits, as `b2sum -l 256` prints it; about a second a gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


SEAL = "checksum"


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """A record of JSON with a checksum over its other fields, so that a record that was altered is known."""
    return {**record, SEAL: _record_checksum(record)}


def is_sealed(record: dict[str, Any]) -> bool:
    """Whether a record's checksum is there and right."""
    return record.get(SEAL) == _record_checksum({key: value for key, value in record.items() if key != SEAL})


def _record_checksum(record: dict[str, Any]) -> str:
    text = json.dumps(json.loads(json.dumps(record)), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def check_target(out: Path, force: bool, *, what: str = "model directory", sign: str = "config.json") -> None:
    """Refuse a target that exists or cannot be made, before any work is done. `force` replaces a directory of the same kind,
    never anything else; it is known by a file, its `sign`. Nor does it replace one that somebody is in."""
    if not os.path.lexists(out):
        place = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
        if not place.is_dir():
            raise OutputError(f"cannot write {out}: {place} is not a directory")
        if not os.access(place, os.W_OK | os.X_OK):
            raise OutputError(f"cannot write {out}: permission denied in {place}")
        return
    kept = _why_kept(out, what, sign)
    if not force:
        raise OutputError(f"{out} exists; choose another name{'' if kept else ', or --force to replace it'}")
    if kept:
        raise OutputError(kept)


def _why_kept(out: Path, what: str, sign: str) -> str | None:
    """Why even --force does not replace what is there."""
    if not out.is_dir() or out.is_symlink():
        return f"{out} is not a directory; --force replaces only a {what}"
    if any(out.iterdir()):
        if not (out / sign).is_file():
            return f"{out} does not look like a {what} (no {sign}); --force will not delete it"
        if sign == "config.json" and not _names_model(out / sign):
            return f"{out} does not look like a {what} (no model_type in {sign}); --force will not delete it"
    if Path.cwd().is_relative_to(out.resolve()):
        which = "is" if Path.cwd() == out.resolve() else "contains"
        return f"{out} {which} the current directory, which is never replaced; choose another name"
    return None


def _names_model(path: Path) -> bool:
    """Whether a configuration is a model's. Other programs have a config.json too, beside files that must not be deleted."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("model_type"), str)


def check_apart(source: str, out: Path) -> None:
    """Refuse to write a model over the one that it is made of: a smaller or rounded one does not give it back, and what it
    is trained towards would be gone."""
    place = Path(source).expanduser()
    if place.exists() and out.exists() and place.samefile(out):
        raise OutputError(f"{out} is MODEL itself, which the result could not give back; choose another name")


def check_room(out: Path, needed: int) -> None:
    """Refuse early where the disk is too small: better now than after minutes of work."""
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(f"{out} requires {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free there")


@contextmanager
def whole_directory(out: Path, force: bool, *, what: str = "model directory", sign: str = "config.json") -> Iterator[Path]:
    """A fresh directory to write into. It takes `out`'s name when the block ends well, and vanishes when it does not."""
    out = out.absolute()
    _recover(out)
    check_target(out, force, what=what, sign=sign)
    made = [parent for parent in out.parents if not parent.exists()]
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    old = out.parent / f".{out.name}.replaced-{os.getpid()}"
    try:
        make_directories(out.parent)
        _sweep(out)
        temporary.mkdir()
        yield temporary
        _open_to_readers(temporary)
        sync_tree(temporary)
        _swap(temporary, out, old)
    except BaseException as error:
        _discard(temporary, out, old, made)
        if (reason := _refusal(error)) is not None:
            raise OutputError(f"cannot write {out}: {reason}; nothing was left behind") from error
        if isinstance(error, OutputError):  # of a file within
            raise OutputError(str(error).replace(str(temporary), str(out))) from error
        raise


def _refusal(error: BaseException) -> str | None:
    """Why the system refused to write, where it did. Libraries in Rust raise what is their own, tokenizers a bare one."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    rust = isinstance(error, SafetensorError) or (type(error) is Exception and "(os error " in str(error))
    return str(error) if rust else None


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary name beside `out` that takes its place when the block ends well."""
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, out)
        sync_directory(out.parent)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _open_to_readers(directory: Path) -> None:
    """Give files the permissions that the user's umask asks for; safetensors makes its own readable by the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.rglob("*"):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)


def _swap(temporary: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    try:
        sync_directory(out.parent)
    except OSError as error:
        raise OutputError(f"{out} is complete, but may not survive a power failure: {error.strerror or error}") from error
    _settle(temporary, out, old)


def _settle(temporary: Path, out: Path, old: Path) -> None:
    """Leave one directory, whenever the work was stopped: what was there before gets its name back where nothing has it, and
    goes where its successor does. It goes under the temporary name: what is called replaced is whole, for `_recover`."""
    if not old.exists():
        return
    if not os.path.lexists(out):
        old.rename(out)
        return
    with suppress(OSError):  # a disk that cannot say that the new one is there keeps the old one
        sync_directory(out.parent)
        old.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def _discard(temporary: Path, out: Path, old: Path, made: list[Path]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    _settle(temporary, out, old)
    remove_empty(made)


def remove_empty(made: list[Path]) -> None:
    """Take away directories that were made on the way to something that did not come about, innermost first."""
    for parent in made:
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _recover(out: Path) -> None:
    """A run that was killed between the two renames of a replacement left the old directory under another name: it gets its
    own back."""
    for old in _left(out, "replaced"):
        if not os.path.lexists(out):
            old.rename(out)


def _sweep(out: Path) -> None:
    """Remove what a killed run of the same target left: it had no chance to clean up."""
    for stale in (*_left(out, "partial"), *_left(out, "replaced")):
        shutil.rmtree(stale, ignore_errors=True)


def _left(out: Path, kind: str) -> list[Path]:
    """Directories of processes that are no more."""
    found = {path: path.name.rsplit("-", 1)[-1] for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.{kind}-*"))}
    return [path for path, number in found.items() if number.isdigit() and not is_alive(int(number))]


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs, be it ours or another user's."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
