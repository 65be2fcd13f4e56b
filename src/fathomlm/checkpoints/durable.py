"""Writing that outlasts a power cut: what has a name on the disk has its contents there too.

A file system may write names before contents, and either of them long after the call that made them returned. A rename
therefore is a promise only in this order: contents synced, directories of the new tree synced, rename, parent synced.
`writing.py` puts whole files and directories in place that way; everything that FathomLM keeps goes through it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
"""What file systems answer that cannot sync a directory; there is nothing more to be done on them."""
CHUNK = 1 << 20


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
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


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
