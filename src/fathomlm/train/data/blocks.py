"""Checksums of a shard's files in blocks, so that a part of a corpus can be verified without reading all of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path

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
