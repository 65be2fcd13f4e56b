"""Batches in an order that follows from the seed and a count alone.

Sample number g, counted from the start of training, is entry g % N of epoch g // N's order. The only state is how many
samples have been taken, so a resumed run, or one on another number of devices, neither repeats nor skips any.

Shapes: B rows of this device, T positions.
"""

from __future__ import annotations

import dataclasses
import operator
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.errors import OptionError
from fathomlm.train.data.corpus import TokenStream

IGNORE = -100
"""The label of a position that is not trained on, as torch's cross entropy takes it."""
PADDING = -1
"""The document number of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one device reads at once."""

    tokens_BT: Tensor
    """Inputs, int64."""
    targets_BT: Tensor
    """The token that follows each input, -100 where there is none to learn, int64."""
    documents_BT: Tensor | None = None
    """Which of the row's documents each input is in, from 0 on, -1 for padding; int32, for masked attention."""
    keep_BT: Tensor | None = None
    """False at padding; given for pairs, whose rows differ in length."""
    source_BS: Tensor | None = None
    """Of an encoder: source tokens with the separator, padded on the right, int64. `tokens_BT` is then what the decoder
    reads, its start token and all of the target but the last token, and `targets_BT` the target."""
    source_keep_BS: Tensor | None = None
    """False at padding of the source."""
    likeliest_BTK: Tensor | None = None
    """A teacher's likeliest tokens at each position, int32, where they are kept (train/teacher_cache.py)."""
    likeliest_logs_BTK: Tensor | None = None
    """Their log-probabilities, float16."""

    @property
    def rows(self) -> int:
        return self.tokens_BT.shape[0]

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of so many rows."""
        check_micro(self.rows, rows)
        return [self._map(operator.itemgetter(slice(at, at + rows))) for at in range(0, self.rows, rows)]

    def pin(self) -> Batch:
        """In memory that a GPU copies from by itself; from other memory a copy first waits for all that the GPU does."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy(self) -> Batch:
        return self._map(lambda tensor: tensor.clone())

    def pick(self, rows_R: Tensor) -> Batch:
        """Some rows, in any order, also repeated."""
        return self._map(lambda tensor: tensor[rows_R])

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What the objective reads, by its names."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = {name: change(tensor) for name, tensor in self.inputs.items() if tensor is not None}
        return dataclasses.replace(self, **changed)


class SampleOrder:
    """The order in which `count` things are taken, epoch after epoch. It keeps one epoch's order, never more."""

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise OptionError("there is nothing to train on: the corpus's split is empty")
        if seed < 0:
            raise OptionError(f"seed must be >= 0, got {seed}")
        self.count = count
        self._seed = seed
        self._shuffle = shuffle
        self._kept: tuple[int, npt.NDArray[np.int64]] | None = None

    def samples(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """What samples `start` to `start + count` are, epoch borders or not."""
        parts, stop = [], start + count
        while start < stop:
            epoch, at = divmod(start, self.count)
            taken = min(stop - start, self.count - at)
            parts.append(self._epoch(epoch)[at : at + taken])
            start += taken
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self.count)
        kept = self._kept
        if kept is None or kept[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
            kept = self._kept = (epoch, generator.permutation(self.count))
        return kept[1]


class Loader:
    """Windows of a stream. Window w's inputs are tokens w*T to (w+1)*T, its labels the tokens behind each of them.

    So each token is an input once an epoch. The last window is padded with the separator, without labels, and the very
    last token has no label.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context: int,
        batch: int,
        seed: int,
        separator: int,
        shuffle: bool = True,
        document_ids: bool = False,
    ) -> None:
        """`batch` is the samples of one step on all devices together.

        With `document_ids` a batch says which document each token is in. A document's last token then has no label: the
        next document's beginning cannot be told from a document that attention does not let it see.
        """
        if context < 1 or batch < 1:
            raise OptionError(f"context and batch must be >= 1, not {context} and {batch}")
        self.batch = batch
        self.context = context
        self._stream = stream
        self._separator = separator
        self._document_ids = document_ids
        self._order = SampleOrder(-(-len(stream) // context), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._order.count

    def samples(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Which window each of these samples is."""
        return self._order.samples(start, count)

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> Batch:
        """The part of rank `rank` of `world` of the global batch that is samples `start` to `start + count`."""
        return self.windows(rank_slice(self.samples(start, count), rank, world))

    def windows(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """Some windows, whatever their order is."""
        rows = [self._window(int(window)) for window in numbers]
        tokens, targets, documents = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(
            tokens_BT=torch.from_numpy(tokens),
            targets_BT=torch.from_numpy(targets),
            documents_BT=torch.from_numpy(documents) if self._document_ids else None,
        )

    def _window(self, window: int) -> tuple[npt.NDArray[Any], ...]:
        T = self.context
        begin = window * T
        end = min(begin + T, len(self._stream))
        behind = min(end + 1, len(self._stream))
        read = self._stream.read(begin, behind)
        tokens_T = np.full(T, self._separator, np.int64)
        targets_T = np.full(T, IGNORE, np.int64)
        documents_T = np.full(T, PADDING, np.int32)
        tokens_T[: end - begin] = read[: end - begin]
        targets_T[: behind - begin - 1] = read[1:]
        if self._document_ids:
            number = self._stream.document_of(begin, behind)
            documents_T[: end - begin] = number[: end - begin] - number[0]
            targets_T[: behind - begin - 1][number[1:] != number[:-1]] = IGNORE
        return tokens_T, targets_T, documents_T


def rank_slice(samples: npt.NDArray[np.int64], rank: int, world: int) -> npt.NDArray[np.int64]:
    """A rank's contiguous share of a global batch."""
    if not 0 <= rank < world:
        raise OptionError(f"rank must be < {world}, got {rank}")
    if len(samples) < 1 or len(samples) % world:
        raise OptionError(f"a batch of {len(samples)} samples does not divide among {world} devices")
    share = len(samples) // world
    return samples[rank * share : (rank + 1) * share]


def check_micro(rows: int, micro: int) -> None:
    if micro < 1 or rows % micro:
        raise OptionError(f"{rows} samples a device do not divide into micro-batches of {micro}")


class BatchLoader(Protocol):
    """What can be prefetched: `Loader` and `PairLoader`."""

    batch: int

    def __len__(self) -> int: ...

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> Batch: ...


def prefetch(
    loader: BatchLoader,
    *,
    start: int = 0,
    steps: int | None = None,
    rank: int = 0,
    world: int = 1,
    micro: int | None = None,
    ahead: int = 4,
    pin: bool = False,
) -> Prefetched:
    """This device's micro-batches of consecutive steps from sample `start` on, made by a thread while others are used.

    `micro` rows each, all of a step's rows where None; `steps` steps, endless where None. What comes is what `batch_at`
    gives, in that order. Leave with `with prefetch(...) as batches`, or `close()`; an error in the thread is raised here.
    """
    if loader.batch % world:
        raise OptionError(f"a batch of {loader.batch} samples does not divide among {world} devices")
    rows = loader.batch // world
    check_micro(rows, micro or rows)

    def produce() -> Iterator[Batch]:
        done = 0
        while steps is None or done < steps:
            whole = loader.batch_at(start + done * loader.batch, loader.batch, rank, world)
            parts = whole.split(micro or rows)
            yield from [part.pin() for part in parts] if pin else parts
            done += 1

    return Prefetched(produce(), ahead)


class Prefetched:
    """An iterator whose items a thread makes in advance, at most `ahead` of them."""

    def __init__(self, items: Iterator[Batch], ahead: int) -> None:
        self._ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(max(1, ahead))
        self._stop = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._work, args=(items,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Batch:
        if self._over:
            raise StopIteration
        item, error = self._ready.get()
        if item is None:
            self.close()
            raise error or StopIteration
        return item

    def __enter__(self) -> Prefetched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and wait for it; safe to call twice."""
        self._over = True
        self._stop.set()
        with suppress(queue.Empty):
            self._ready.get_nowait()  # room for what the thread may be waiting to put; it puts nothing after that
        self._thread.join()

    def _work(self, items: Iterator[Batch]) -> None:
        try:
            for item in items:
                if not self._put(item, None):
                    return
            self._put(None, None)
        except BaseException as error:  # handed to whoever is waiting, who would wait for ever otherwise
            self._put(None, error)

    def _put(self, item: Batch | None, error: BaseException | None) -> bool:
        if self._stop.is_set():
            return False
        self._ready.put((item, error))
        return True
