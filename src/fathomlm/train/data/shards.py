"""One shard on the disk: tokens, where documents begin, and for pairs where targets begin."""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fathomlm.checkpoints.durable import sync_file
from fathomlm.train.data.blocks import BlockChecksums, checksums
from fathomlm.train.data.manifest import Shard

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
