"""Sources in, a corpus on disk out, one segment at a time.

A segment is as many consecutive documents as make a shard. Its shards are written and renamed before corpus.json says
that they are there, so a preparation may be stopped at any moment, even by a power cut: run again, it goes on behind the
last whole segment and ends with the same bytes as one that was never stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import remove_empty, sync_directory, whole_directory
from fathomlm.errors import DataError, OutputError
from fathomlm.train.data import PrepareOptions
from fathomlm.train.data.corpus import TOKENIZER, Corpus, check_sizes
from fathomlm.train.data.encoding import LOTS, Encoded, EncoderSettings, encode_in_order
from fathomlm.train.data.manifest import FILE, SPLITS, Cursor, Manifest
from fathomlm.train.data.shards import ShardWriter
from fathomlm.train.data.sources import Document, DocumentLimit, expand, read
from fathomlm.train.data.tokenizers import find_tokenizer, fingerprint, separator_id, vocab_size

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


_OURS = re.compile(r"(train|validation)-\d{5}\.(bin|idx|mid)|corpus\.json|tokenizer|\..*\.partial(-\d+)?")
"""What a corpus directory may hold; --force deletes nothing else."""


OnProgress = Callable[[PreparationProgress], None]


def prepare(options: PrepareOptions, on_progress: OnProgress | None = None) -> Corpus:
    """Make a corpus, or finish one. One that is complete and asked for in the same words is returned as it is.

    Raises without leaving anything behind where no segment was finished; else the finished ones stay, to go on from.
    """
    out = options.out.expanduser()
    _check_place(out)
    tokenizer = find_tokenizer(options.tokenizer)
    wanted = _wanted(options, tokenizer)
    missing = [parent for parent in out.absolute().parents if not parent.exists()]
    try:
        if options.force and (out / FILE).is_file():
            _delete(out)
        begun = (out / FILE).is_file()
        if not (begun and _same(out, wanted).complete):
            with _or_nothing(out):
                if not begun:
                    _begin(out, wanted, tokenizer)
                with _alone(out):
                    _fill(out, Manifest.read(out), tokenizer, options, on_progress)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}; what was finished is kept") from error
    finally:
        remove_empty(missing)
    return Corpus.open(out)


def _wanted(options: PrepareOptions, tokenizer: Any) -> Manifest:
    """The corpus that the options describe, before any of it is there."""
    vocab = vocab_size(tokenizer)
    return Manifest(
        kind="tokens" if options.pairs is None else "pairs",
        tokenizer=options.tokenizer,
        fingerprint=fingerprint(tokenizer),
        vocab=vocab,
        dtype="uint16" if vocab <= 1 << 16 else "uint32",
        separator=separator_id(tokenizer, options.separator),
        columns=options.pairs or (options.column,),
        sources=tuple(expand(options.sources, validation_from=options.validation_from, leave_out=options.out.expanduser())),
        validation_fraction=options.fraction,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        source_prefix=options.source_prefix,
        skip_above=options.max_document_bytes if options.skip_long else None,
    )


def _check_place(out: Path) -> None:
    """Refuse, before any work is done, a place that holds something else than a corpus."""
    if not os.path.lexists(out) or (out / FILE).is_file():
        return
    if out.is_symlink() or not out.is_dir() or any(out.iterdir()):
        raise OutputError(f"{out} exists and is not a corpus (no {FILE}); choose another name")


def _begin(out: Path, wanted: Manifest, tokenizer: Any) -> None:
    """A corpus without a document."""
    with whole_directory(out, force=out.is_dir()) as directory:
        tokenizer.save_pretrained(directory / TOKENIZER)
        wanted.write(directory)
        saved = fingerprint(find_tokenizer(str(directory / TOKENIZER)))
        if saved != wanted.fingerprint:
            raise DataError(f"the tokenizer {wanted.tokenizer} changes when it is saved and read again; give its directory")


def _same(out: Path, wanted: Manifest) -> Manifest:
    found = Manifest.read(out)
    if (difference := found.difference(wanted)) is not None:
        raise OutputError(f"{out} was prepared with {difference}; choose another name, or --force to start again")
    check_sizes(out, found)
    return found


def _delete(out: Path) -> None:
    strangers = sorted(path.name for path in out.iterdir() if _OURS.fullmatch(path.name) is None)
    if strangers or out.is_symlink():
        what = f"holds {strangers[0]}, which is no part of a corpus" if strangers else "is a link"
        raise OutputError(f"{out} {what}; --force will not delete it")
    with _alone(out):
        _remove(out)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two preparations of one corpus would write over each other. The lock goes with the process, however it ends."""
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise OutputError(f"another process is preparing {out}; wait for it, or choose another name") from error
    finally:
        os.close(handle)


@contextmanager
def _or_nothing(out: Path) -> Iterator[None]:
    """Where nothing at all was kept, the directory goes too, whenever the work was stopped: between any two of its steps,
    hence one of these around all of them. What another process has begun in the meantime stays."""
    try:
        yield
    except BaseException:
        if (out / FILE).is_file() and not Manifest.read(out).started:
            with suppress(OutputError), _alone(out):
                _remove(out)
        raise


def _fill(out: Path, manifest: Manifest, tokenizer: Any, options: PrepareOptions, on_progress: OnProgress | None) -> None:
    """Everything from the cursor on."""
    for left in (*out.glob(".*.partial"), *out.glob(".*.partial-*")):
        left.unlink()
    settings = EncoderSettings(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        separator=manifest.separator,
        dtype=manifest.dtype,
        prefix=manifest.source_prefix,
    )
    writer = SegmentWriter(out, manifest)
    hint = "; --max-document-bytes raises the bound, --skip-long leaves such documents out"
    limit = DocumentLimit(bytes=options.max_document_bytes, skip=options.skip_long, hint=hint)
    batches = encode_in_order(
        batches_behind(manifest, limit), lambda batch: [item.fields for item in batch.documents], settings, options.workers
    )
    characters = 0
    try:
        for batch, encoded in batches:
            more = writer.take(batch, encoded)
            characters += batch.characters
            if on_progress is not None:
                on_progress(writer.progress(batch, characters))
            if not more:
                break
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        batches.close()


def _remove(out: Path) -> None:
    """Renamed first, to a name that the next run sweeps away: a half-deleted corpus is never met under its own name."""
    away = out.absolute().parent / f".{out.absolute().name}.partial-{os.getpid()}"
    out.rename(away)
    shutil.rmtree(away)
