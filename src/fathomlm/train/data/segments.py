"""Segments: runs of consecutive documents that are written, and resumed behind, as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fathomlm.checkpoints.durable import sync_directory
from fathomlm.errors import DataError
from fathomlm.train.data.encoding import LOTS, Encoded
from fathomlm.train.data.manifest import SPLITS, Cursor, Manifest
from fathomlm.train.data.shards import ShardWriter
from fathomlm.train.data.sources import Document, DocumentLimit, read

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 1 << 20
"""A batch for the tokenizer ends with whichever it reaches first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationProgress:
    """How far a preparation is, what an earlier run did included."""

    documents: int
    tokens: int
    characters: int
    """Text that this run has tokenised."""
    share: float | None
    """Of the work, between 0 and 1; None where the hub does not say how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """Consecutive documents of one source."""

    source: int
    first: int
    """The number of the first document in its source."""
    documents: tuple[Document, ...]
    characters: int


def batches_behind(manifest: Manifest, limit: DocumentLimit | None = None) -> Iterator[SourceBatch]:
    """All documents behind the cursor. Batches never cross sources, and where they end changes nothing in the corpus."""
    for number in range(manifest.cursor.source, len(manifest.sources)):
        source = manifest.sources[number]
        first = manifest.cursor.documents if number == manifest.cursor.source else 0
        waiting: list[Document] = []
        characters = 0
        for document in read(source, manifest.columns, skip=first, limit=limit):
            waiting.append(document)
            characters += sum(map(len, document.fields))
            if len(waiting) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield SourceBatch(source=number, first=first, documents=tuple(waiting), characters=characters)
                first += len(waiting)
                waiting, characters = [], 0
        if waiting:
            yield SourceBatch(source=number, first=first, documents=tuple(waiting), characters=characters)


class SegmentWriter:
    """The segment being written, and the manifest of what is done."""

    def __init__(self, out: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._out = out
        self._limit = int(manifest.validation_fraction * LOTS)
        self._cursor = manifest.cursor
        self._open()

    def take(self, batch: SourceBatch, encoded: Encoded) -> bool:
        """Write a batch; False once there is enough."""
        held_out = self.manifest.sources[batch.source].validation
        starts, middles, lots = encoded.starts.tolist(), encoded.middles.tolist(), encoded.lots.tolist()
        for at in range(len(batch.documents)):
            self._cursor = Cursor(source=batch.source, documents=batch.first + at + 1)
            begin, end = starts[at], starts[at + 1]
            if batch.documents[at].too_long:
                self._long += 1
                continue
            if begin == end:
                self._empty += 1
                continue
            split = "validation" if held_out or lots[at] < self._limit else "train"
            self._writers[split].add(encoded.ids[begin:end], middles[at] - begin)
            self._documents += 1
            enough = self.manifest.max_tokens is not None and self._tokens("train") >= self.manifest.max_tokens
            if enough or sum(writer.tokens for writer in self._writers.values()) >= self.manifest.shard_tokens:
                self._commit()
            if enough:
                return False
        return True

    def finish(self) -> None:
        self._commit()
        if not self.manifest.started:
            named = ", ".join(source.name for source in self.manifest.sources[:3])
            more = ", ..." if len(self.manifest.sources) > 3 else ""
            raise DataError(f"the sources hold no document with text, so there is nothing to prepare ({named}{more})")
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.write(self._out)

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()

    def progress(self, batch: SourceBatch, characters: int) -> PreparationProgress:
        documents = sum(split.documents for split in self.manifest.splits.values()) + self._documents
        sizes = [source.bytes for source in self.manifest.sources]
        share = None
        if None not in sizes:
            done = sum(size or 0 for size in sizes[: batch.source]) + batch.documents[-1].position
            share = min(1.0, done / max(1, sum(size or 0 for size in sizes)))
        if self.manifest.max_tokens is not None:
            share = max(share or 0.0, min(1.0, self._tokens("train") / self.manifest.max_tokens))
        tokens = sum(self._tokens(split) for split in SPLITS)
        return PreparationProgress(documents=documents, tokens=tokens, characters=characters, share=share)

    def _tokens(self, split: str) -> int:
        return self.manifest.splits[split].tokens + self._writers[split].tokens

    def _open(self) -> None:
        pairs = self.manifest.kind == "pairs"
        self._writers = {
            name: ShardWriter(self._out, f"{name}-{len(split.shards):05d}", pairs)
            for name, split in self.manifest.splits.items()
        }
        self._empty = self._long = 0
        self._documents = 0

    def _commit(self) -> None:
        shards = {name: writer.finish() for name, writer in self._writers.items()}
        sync_directory(self._out)
        self.manifest = self.manifest.plus(shards, self._cursor, self._empty, self._long)
        self.manifest.write(self._out)
        self._open()
