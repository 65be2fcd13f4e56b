"""A disk that fails, or loses power, at any call; interposed between the code and the file system, as SQLite is tested.

`Disk(root)` counts every call that changes something beneath `root`: opening for writing, writing, syncing, renaming,
linking, making and removing. One of them can be made to fail. It also knows what has been synced, so it can say what would
be found there after a power cut in front of any call:

- `synced`: only what was synced. Names as they were when their directory was last synced, contents as they were when
  their file was.
- `names`: all names as they are, but only contents that were synced; the rest reads as zeros. A journal that is flushed
  before the data does this (ext4).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch

KINDS = ("synced", "names")
Entries = dict[str, tuple[str, Any]]


class Disk:
    def __init__(
        self, root: Path, *, fails_at: int | None = None, dead: bool = False, before: Callable[[int], None] | None = None
    ):
        """Call number `fails_at` fails for want of room; a `dead` disk fails from there on. `before` is told each number."""
        self.root = root
        self.calls: list[str] = []
        self._fails_at, self._dead, self._before = fails_at, dead, before
        self._files: dict[int, bytes] = {}
        self._directories: dict[int, Entries] = {}
        self._held: list[int] = []
        self._real_open, self._real_fsync, self._real_os_open = io.open, os.fsync, os.open
        for place, _, names in os.walk(root, topdown=False):
            for path in (*(Path(place, name) for name in names), Path(place)):
                if not path.is_symlink():
                    handle = self._real_os_open(path, os.O_RDONLY)
                    self._remember(handle)
                    os.close(handle)

    # --- what is on the disk ---

    def _remember(self, handle: int) -> None:
        """Take what a handle leads to as synced. It stays open, so that its number is not given to another file."""
        held = self._real_os_open(f"/proc/self/fd/{handle}", os.O_RDONLY)
        self._held.append(held)
        found = os.fstat(held)
        if stat.S_ISDIR(found.st_mode):
            self._directories[found.st_ino] = _entries(f"/proc/self/fd/{held}")
        else:
            self._files[found.st_ino] = os.pread(held, found.st_size, 0)

    def after_a_cut(self, kind: str) -> dict[str, bytes | str | None]:
        """What would be found: bytes of files, targets of links, None for directories, by path."""
        found: dict[str, bytes | str | None] = {}
        self._collect(self.root.stat().st_ino, self.root, "", kind, found)
        return found

    def _collect(self, number: int, real: Path | None, prefix: str, kind: str, found: dict[str, Any]) -> None:
        if kind == "synced":
            entries = self._directories.get(number, {})
        else:
            assert real is not None
            entries = _entries(str(real))
        for name, (what, value) in entries.items():
            path = None if kind == "synced" or real is None else real / name
            if what == "link":
                found[prefix + name] = value
            elif what == "directory":
                found[prefix + name] = None
                self._collect(value, path, f"{prefix}{name}/", kind, found)
            else:
                known = self._files.get(value, b"")
                size = path.stat().st_size if path is not None else len(known)
                now = b"" if path is None else path.read_bytes()
                found[prefix + name] = known if known == now else known[:size].ljust(size, b"\0")

    # --- calls ---

    @contextmanager
    def interposed(self) -> Iterator[Disk]:
        """Calls beneath the root go through this disk."""
        with contextmanager(self._patched)():
            yield self
        for handle in self._held:
            os.close(handle)
        self._held.clear()

    def _patched(self) -> Iterator[None]:
        patches = [mock.patch.object(os, name, self._counted(name)) for name in _CALLS]
        patches += [mock.patch.object(os, "fsync", self._fsync), mock.patch.object(os, "open", self._os_open)]
        patches += [mock.patch.object(io, "open", self._open), mock.patch.object(builtins, "open", self._open)]
        write = safetensors.torch.serialize_file

        def serialize(tensors: Any, path: Any, **more: Any) -> Any:
            self._call("write", path)
            return write(tensors, path, **more)

        patches.append(mock.patch.object(safetensors.torch, "serialize_file", serialize))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()

    def _call(self, name: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.path.isabs(path) and not Path(path).is_relative_to(self.root):
            return
        number = len(self.calls)
        self.calls.append(f"{name} {path}")
        if self._before is not None:
            self._before(number)
        if self._fails_at is not None and (number == self._fails_at or (self._dead and number > self._fails_at)):
            raise OSError(errno.EIO if self._dead else errno.ENOSPC, "the disk is full")

    def _counted(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *args: Any, **more: Any) -> Any:
            self._call(name, args[0] if name == "symlink" else path)
            return real(path, *args, **more)

        return call

    def _fsync(self, handle: Any) -> None:
        place = os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
        self._call("fsync", place)
        self._remember(handle if isinstance(handle, int) else handle.fileno())

    def _os_open(self, path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            self._call("open", path)
        return self._real_os_open(path, flags, *args, **more)

    def _open(self, file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        opened_for_writing = not isinstance(file, int) and any(letter in mode for letter in "wax+")
        if opened_for_writing:
            self._call("open", file)
        opened = self._real_open(file, mode, *args, **more)
        return _Written(opened, self, file) if opened_for_writing else opened


_CALLS = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "symlink")


class _Written:
    """A file whose writes are counted."""

    def __init__(self, file: Any, disk: Disk, path: Any) -> None:
        self._file, self._disk, self._path = file, disk, path

    def write(self, data: Any) -> Any:
        self._disk._call("write", self._path)
        return self._file.write(data)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _entries(directory: str) -> Entries:
    found: Entries = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink():
                found[entry.name] = ("link", os.readlink(entry.path))
            elif entry.is_dir():
                found[entry.name] = ("directory", entry.inode())
            else:
                found[entry.name] = ("file", entry.inode())
    return found


def lay_out(found: dict[str, bytes | str | None], target: Path) -> Path:
    """Make a tree of what `after_a_cut` found."""
    target.mkdir(parents=True)
    for name, value in found.items():
        path = target / name
        if value is None:
            path.mkdir(exist_ok=True)
        elif isinstance(value, str):
            path.symlink_to(value)
        else:
            path.write_bytes(value)
    return target
