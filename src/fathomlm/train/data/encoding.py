"""Text to tokens on several processes, in the order in which the text came."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fathomlm.checkpoints.confined import no_panic
from fathomlm.errors import DataError
from fathomlm.interrupts import no_interrupts

LOTS = 1 << 64
"""How many lots there are; a document's lot decides whether it is held out."""

Texts = Sequence[tuple[str, ...]]
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A batch of documents as tokens."""

    ids: npt.NDArray[Any]
    """The tokens of all documents, one after the other, each ended by the separator."""
    starts: npt.NDArray[np.int64]
    """Where each document begins in `ids`, and where the last one ends; a document without text has no tokens."""
    middles: npt.NDArray[np.int64]
    """Where each document's last field begins: the target of a pair, the whole of a text."""
    lots: npt.NDArray[np.uint64]
    """A number that depends on the document's (first) text only, evenly spread over all lots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """All that an encoder needs; small enough to send to each process once."""

    tokenizer: str
    """The tokenizer's JSON."""
    separator: int
    dtype: str
    prefix: str = ""
    """What stands in front of a pair's source, tokenised with it."""


class Encoder:
    """Tokenises as the tokenizer itself would, without the cutting and padding that some files ask for."""

    def __init__(self, settings: EncoderSettings) -> None:
        from tokenizers import Tokenizer

        self._settings = settings
        self._tokenizer = Tokenizer.from_str(settings.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, batch: Texts) -> Encoded:
        full = [all(text.strip() for text in fields) for fields in batch]
        prefix = self._settings.prefix
        texts = [
            prefix + text if prefix and not at else text
            for fields, some in zip(batch, full, strict=True)
            if some
            for at, text in enumerate(fields)
        ]
        with no_panic("tokenising documents", DataError):
            found = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        pieces: list[list[int]] = []
        starts, middles, at = [0], [], 0
        for fields, some in zip(batch, full, strict=True):
            parts = [encoding.ids for encoding in itertools.islice(found, len(fields))] if some else []
            if not all(parts):  # a normaliser may leave nothing of a text
                parts = []
            for part in parts:
                pieces.append(part)
                at += len(part)
            middles.append(at - (len(parts[-1]) if parts else 0))
            if parts:
                pieces.append([self._settings.separator])
                at += 1
            starts.append(at)
        return Encoded(
            ids=np.fromiter(itertools.chain.from_iterable(pieces), dtype=self._settings.dtype, count=at),
            starts=np.array(starts, dtype=np.int64),
            middles=np.array(middles, dtype=np.int64),
            lots=np.array([lot(fields[0]) for fields in batch], dtype=np.uint64),
        )


def lot(text: str) -> int:
    """The lot that a text draws: the same for every copy of it, wherever it stands."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def encode_in_order(
    batches: Iterable[Batch], texts: Callable[[Batch], Texts], settings: EncoderSettings, workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    """Each batch with its tokens. The result does not depend on `workers`; one works in this process.

    A single batch is not worth starting processes for.
    """
    source = iter(batches)
    first = list(itertools.islice(source, 2))
    if workers == 1 or len(first) < 2:
        encoder = Encoder(settings)
        for batch in itertools.chain(first, source):
            yield batch, encoder.encode(texts(batch))
        return
    with _helpers(workers) as helpers:
        yield from _round(helpers, settings, itertools.chain(first, source), texts)


def _round(
    helpers: Sequence[Connection], settings: EncoderSettings, batches: Iterable[Batch], texts: Callable[[Batch], Texts]
) -> Iterator[tuple[Batch, Encoded]]:
    """Batches go to the processes in turn and come back in turn, so the order needs no bookkeeping.

    A process never has more than one batch: two processes that both send into full pipes would wait for ever. The next
    batch has been read by the time a result is taken, so none is idle for long.

    Settings go to them when all have begun. They do not fit into a pipe: whoever sends them waits until the other end has
    loaded what it needs, and as a process' arguments they would make each begin only when the one before it is ready.
    """
    free, busy = deque(helpers), deque[tuple[Connection, Batch]]()
    try:
        for helper in helpers:
            helper.send(settings)
        for batch in batches:
            done = None
            if not free:
                helper, earlier = busy.popleft()
                done = (earlier, _result(helper))
                free.append(helper)
            helper = free.popleft()
            helper.send(texts(batch))
            busy.append((helper, batch))
            if done is not None:
                yield done
        for helper, earlier in busy:
            yield earlier, _result(helper)
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise DataError(
            "a tokenizer process was killed (out of memory?); run the same command with fewer --workers to continue"
        ) from error


def _result(helper: Connection) -> Encoded:
    answer = helper.recv()
    if isinstance(answer, BaseException):
        raise answer
    assert isinstance(answer, Encoded)
    return answer


@contextmanager
def _helpers(count: int) -> Iterator[list[Connection]]:
    """Processes that tokenise, gone when the block ends. A new interpreter each: forking with threads about is unsafe."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_help, args=(there,), daemon=True)
            with no_interrupts():
                process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        yield ends
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _help(pipe: Connection) -> None:
    """A helper's life: until the other end is gone, which it also is when the main process was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as there should be threads
    try:
        encoder = Encoder(pipe.recv())
        while True:
            batch = pipe.recv()
            try:
                answer: Encoded | Exception = encoder.encode(batch)
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        return
