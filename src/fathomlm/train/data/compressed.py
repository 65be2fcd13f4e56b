"""Lines of a file that may be compressed. A damaged or shortened file is an error, never a quiet end."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fathomlm.errors import DataError
from fathomlm.jsonfile import parse

MOST = 64 << 20
"""Bytes of one line, where no one says otherwise."""
_CHUNK = 1 << 17
_PIECE = 1 << 10
"""Packed bytes that are unpacked at once: zstd makes at most 32,768 bytes of one, so this is at most 32 MB."""
_WINDOW = 1 << 31
"""The largest window that zstd's long mode uses."""


def open_lines(path: Path, most: int = MOST) -> Iterator[tuple[bytes | None, int]]:
    """Each line, with how many bytes of the file have been read for it. None stands for a line of more than `most` bytes,
    which is never held whole: who goes on passes over it."""
    try:
        with path.open("rb") as file, _unpacked(path, file) as lines:
            while line := lines.readline(most + 2):
                if len(line.removesuffix(b"\n").removesuffix(b"\r")) <= most:
                    yield line, file.tell()
                    continue
                yield None, file.tell()
                while line and not line.endswith(b"\n"):
                    line = lines.readline(_CHUNK)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def json_of(line: bytes, number: int, where: str) -> Any:
    """What a line of JSON says; the first may begin with a byte order mark."""
    return parse(line, where, error=DataError, nonfinite=True)


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes] | io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(file, "rb")
        case ".xz":
            return lzma.open(file, "rb")
        case ".zst":
            return io.BufferedReader(_Zstd(file), _CHUNK)
    return file


class _Zstd(io.RawIOBase):
    """zstandard's own reader takes a file that stops in the middle of a frame for a whole one; this one does not."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError("reading .zst files needs the package zstandard: pip install 'fathomlm[train]'") from error
        self._file = file
        self._damage: type[Exception] = zstandard.ZstdError
        self._context = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._frame: Any | None = None
        self._packed = memoryview(b"")
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed and not (packed := self._file.read(_CHUNK)):
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._packed = self._packed or memoryview(packed)
            piece, rest = self._packed[:_PIECE], self._packed[_PIECE:]
            self._frame = self._frame or self._context.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._damage as error:
                raise EOFError(str(error)) from error
            unused = len(self._frame.unused_data) if self._frame.eof else 0
            self._packed = self._packed[len(piece) - unused :] if unused else rest
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
