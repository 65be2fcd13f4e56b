"""One shard on the disk: tokens, where documents begin, and for pairs where targets begin.

Checksums are taken of blocks too, so that a part of a corpus can be verified without reading all of it.
"""

from __future__ import annotations

import hashlib
import os
import random
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fathomlm.checkpoints.writing import sync_file
from fathomlm.train.data.manifest import Shard

BLOCK = 1 << 20
"""Bytes in a block; the last one of a file may have fewer."""
SAMPLE = 64 << 20
"""Bytes that a sample reads at most."""


class BlockChecksums:
    """The checksums of a file's blocks, taken while it is written."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._begin()

    def update(self, raw: bytes) -> None:
        view = memoryview(raw)
        while len(view):
            part, view = view[: self._room], view[self._room :]
            self._digest.update(part)
            self._room -= len(part)
            if not self._room:
                self._end()

    def finish(self) -> tuple[str, ...]:
        if self._room < BLOCK:
            self._end()
        return tuple(self._done)

    def _begin(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._room = BLOCK

    def _end(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._begin()


def checksums(raw: bytes) -> tuple[str, ...]:
    """The checksums of the blocks of a file with these contents."""
    blocks = BlockChecksums()
    blocks.update(raw)
    return blocks.finish()


def damaged(directory: Path, shards: Iterable[Shard], budget: int, draw: random.Random) -> Path | None:
    """The first file of which a block is not what was written, among blocks drawn at random, `budget` bytes in all.

    Each check draws anew, so that what one has missed another may find. What a check reads changes no result, which is why
    no seed is asked for.
    """
    places = [
        ((directory / shard.file).with_suffix(suffix), number, wanted)
        for shard in shards
        for suffix, blocks in shard.blocks.items()
        for number, wanted in enumerate(blocks)
    ]
    for file, number, wanted in sorted(draw.sample(places, min(len(places), budget // BLOCK))):
        with file.open("rb") as handle:
            handle.seek(number * BLOCK)
            if hashlib.blake2b(handle.read(BLOCK), digest_size=16).hexdigest() != wanted:
                return file
    return None


PARTIAL = ".partial"


class ShardWriter:
    """Writes as documents come, under temporary names; `finish` gives the files their own names.

    No file is made for a shard without documents.
    """

    def __init__(self, directory: Path, stem: str, pairs: bool) -> None:
        self.tokens = 0
        self._directory = directory
        self._stem = stem
        self._pairs = pairs
        self._starts = array("Q", [0])
        self._middles = array("Q")
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._blocks = BlockChecksums()

    def add(self, ids: npt.NDArray[Any], middle: int) -> None:
        """One document; `middle` is where a pair's target begins in it."""
        if self._file is None:
            self._file = self._temporary(".bin").open("wb")
        raw = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._blocks.update(raw)
        self._middles.append(self.tokens + middle)
        self.tokens += len(ids)
        self._starts.append(self.tokens)

    def finish(self) -> Shard | None:
        """Put all on the disk, then rename; the shard's entry, or None where there were no documents."""
        if self._file is None:
            return None
        self._file.close()
        index = hashlib.sha256()
        blocks = {".bin": self._blocks.finish()}
        parts = [(".idx", self._starts), *([(".mid", self._middles)] if self._pairs else [])]
        for suffix, numbers in parts:
            raw = np.array(numbers, dtype="<u8").tobytes()
            index.update(raw)
            blocks[suffix] = checksums(raw)
            self._temporary(suffix).write_bytes(raw)
        for suffix in blocks:
            sync_file(self._temporary(suffix))
        for suffix in blocks:
            os.replace(self._temporary(suffix), self._directory / f"{self._stem}{suffix}")
        return Shard(
            file=f"{self._stem}.bin",
            tokens=self.tokens,
            documents=len(self._starts) - 1,
            sha256=self._digest.hexdigest(),
            index_sha256=index.hexdigest(),
            blocks=blocks,
        )

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        for suffix in (".bin", ".idx", ".mid"):
            self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return self._directory / f".{self._stem}{suffix}{PARTIAL}"
