"""A GGUF file's metadata and tensors, with every length checked against the file before it is believed.

`gguf.GGUFReader` is not used for this: past the end of a file its reads come back empty instead of failing, so that one
damaged list length makes it loop for ever, and it takes 16 s over Gemma's vocabulary where this takes a third of one.
The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the block formats stay `gguf`'s.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from fathomlm.errors import CheckpointError, ModelNotFound, UnsupportedModel

_VERSIONS = (2, 3)
_LONGEST_STRING = 1 << 26
"""No chat template or tensor name comes near this; a damaged length must not copy gigabytes."""
_LONGEST_LIST = 1 << 24
"""Sixteen million items; the largest vocabularies have a quarter of a million tokens."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""struct's letter for each of GGUF's fixed-size value types."""
_NUMPY_KINDS = {"?": "u1"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """In torch's order (GGUF writes the innermost dimension first)."""
    kind: Any
    """Its `gguf.GGMLQuantizationType`."""
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by GGUF name, and their values one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self._data = _mapped(path)
        self._position = 0
        try:
            self._read_header()
        except struct.error as error:
            raise self._damaged("it ends in the middle of its header") from error
        except UnicodeDecodeError as error:
            raise self._damaged(f"the string at byte {self._position:,} of its header is not UTF-8") from error

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its GGUF name, as float32."""
        entry = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)
        rows = raw.reshape(*entry.shape[:-1], -1)
        try:
            # Damaged scales may overflow while they are unpacked; the check below says so in one line.
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(rows, entry.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name} is stored as {entry.kind.name}, which gguf cannot unpack"
            ) from error
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(entry.shape)
        if not torch.isfinite(tensor).all():
            raise self._damaged(f"{name} holds values that are not finite")
        return tensor

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        self._position = 4
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            known = " and ".join(str(known) for known in _VERSIONS)
            raise CheckpointError(f"{self.path}: GGUF version {version} cannot be read; known: {known}, little-endian")
        tensor_count, key_count = self._unpack("QQ")
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                raise self._damaged(f"duplicate key {key!r} in its header")
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        found = [self._tensor_entry() for _ in range(self._checked_count(tensor_count, 24))]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment must be a power of two, got {alignment!r}")
        start = -(-self._position // alignment) * alignment
        for entry in found:
            self._place(entry, start)

    def _place(self, entry: TensorEntry, start: int) -> None:
        """Move an entry's offset from the start of the data to the start of the file, if the file reaches that far."""
        if entry.name in self.tensors:
            raise self._damaged(f"duplicate tensor {entry.name!r}")
        offset = start + entry.offset
        if offset + entry.nbytes > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated: {entry.name!r} ends at byte {offset + entry.nbytes:,}, the file at byte "
                f"{len(self._data):,}; fetch it again"
            )
        self.tensors[entry.name] = TensorEntry(entry.name, entry.shape, entry.kind, offset, entry.nbytes)

    def _tensor_entry(self) -> TensorEntry:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if not 1 <= dimensions <= 4:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"{dimensions}Q")))
        number, offset = self._unpack("IQ")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise self._damaged(f"tensor {name!r} is of an unknown type ({number})") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._damaged(f"tensor {name!r} of shape {list(shape)} cannot be {kind.name}")
        return TensorEntry(name, shape, kind, offset, math.prod(shape) // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            (value,) = self._unpack(_SCALARS[kind])
            return value
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"its header holds a value of unknown type {kind}")
        item, count = self._unpack("IQ")
        if item == _STRING:
            return [self._string() for _ in range(self._checked_count(count, 8))]
        if item not in _SCALARS:
            raise self._damaged(f"its header holds a list of unknown type {item}")
        letter = _SCALARS[item]
        width = struct.calcsize("<" + letter)
        self._checked_count(count, width)
        values = np.frombuffer(self._data, dtype=f"<{_NUMPY_KINDS.get(letter, letter)}", count=count, offset=self._position)
        self._position += count * width
        return values.tolist()

    def _unpack(self, letters: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + letters, self._data, self._position)
        self._position += struct.calcsize("<" + letters)
        return values

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._position)
        start = self._position + 8
        if length > _LONGEST_STRING or start + length > len(self._data):
            raise self._damaged(f"its header has a string of {length:,} bytes")
        self._position = start + length
        return self._data[start : start + length].decode("utf-8")

    def _checked_count(self, count: int, least_bytes: int) -> int:
        if count > _LONGEST_LIST or count * least_bytes > len(self._data) - self._position:
            raise self._damaged(f"its header announces a list of {count:,} items")
        return count

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or truncated GGUF file: {why}")


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"no file at {path}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
