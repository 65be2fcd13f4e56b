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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import remove_empty, whole_directory
from fathomlm.errors import DataError, OutputError
from fathomlm.train.data.corpus import TOKENIZER, Corpus, check_sizes
from fathomlm.train.data.encoding import EncoderSettings, encode_in_order
from fathomlm.train.data.manifest import FILE, Manifest
from fathomlm.train.data.options import PrepareOptions
from fathomlm.train.data.segments import PreparationProgress, SegmentWriter, batches_behind
from fathomlm.train.data.sources import DocumentLimit, expand
from fathomlm.train.data.tokenizers import find_tokenizer, fingerprint, separator_id, vocab_size

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
        manifest = _begin(out, wanted, tokenizer, options.force)
        if not manifest.complete:
            with _alone(out), _or_nothing(out):
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


def _begin(out: Path, wanted: Manifest, tokenizer: Any, force: bool) -> Manifest:
    """The manifest to go on from: the one that is there if it is of the same corpus, or a new one."""
    if (out / FILE).is_file():
        if not force:
            return _same(out, wanted)
        _delete(out)
    with _or_nothing(out), whole_directory(out, force=out.is_dir()) as directory:
        tokenizer.save_pretrained(directory / TOKENIZER)
        wanted.write(directory)
        saved = fingerprint(find_tokenizer(str(directory / TOKENIZER)))
        if saved != wanted.fingerprint:
            raise DataError(f"the tokenizer {wanted.tokenizer} changes when it is saved and read again; give its directory")
    return wanted


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
    """Where nothing at all was kept, the directory goes too, however early the work was stopped."""
    try:
        yield
    except BaseException:
        if (out / FILE).is_file() and not Manifest.read(out).started:
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
