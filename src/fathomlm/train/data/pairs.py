"""Batches of pairs, a source text and what is to be made of it, for decoders and for encoder-decoders.

The order is that of `loader.Order`, so all that is said there of resuming and of devices holds. Rows are padded to the
longest of the *global* batch: how a batch is split over devices and micro-batches changes nothing in it.

Shapes: B rows of this device, S source positions, T target (or all) positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.errors import OptionError
from fathomlm.train.data.corpus import PairStream
from fathomlm.train.data.loader import IGNORE, Batch, Order, check_micro, rank_slice

MULTIPLE = 8
"""Widths are rounded up to this, which is what matrix units like."""

_Pair = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """What one device reads at once, for a model that reads the source apart from the target."""

    source_BS: Tensor
    """Source tokens, padded on the right, int64."""
    source_keep_BS: Tensor
    """False at padding."""
    targets_BT: Tensor
    """Target tokens with the separator, -100 at padding, int64; a decoder's inputs are these, shifted by one."""

    @property
    def rows(self) -> int:
        return self.source_BS.shape[0]

    def split(self, rows: int) -> list[PairBatch]:
        """Micro-batches of so many rows."""
        check_micro(self.rows, rows)
        return [
            PairBatch(
                source_BS=self.source_BS[at : at + rows],
                source_keep_BS=self.source_keep_BS[at : at + rows],
                targets_BT=self.targets_BT[at : at + rows],
            )
            for at in range(0, self.rows, rows)
        ]

    def pin(self) -> PairBatch:
        """In memory that a GPU copies from by itself."""
        return PairBatch(
            source_BS=self.source_BS.pin_memory(),
            source_keep_BS=self.source_keep_BS.pin_memory(),
            targets_BT=self.targets_BT.pin_memory(),
        )

    def to(self, device: torch.device | str) -> PairBatch:
        return PairBatch(
            source_BS=self.source_BS.to(device, non_blocking=True),
            source_keep_BS=self.source_keep_BS.to(device, non_blocking=True),
            targets_BT=self.targets_BT.to(device, non_blocking=True),
        )


class PairLoader:
    """Each pair once an epoch. Long sources lose their beginning, long targets their end.

    A target that was cut also loses its separator, so it does not teach to stop there.
    """

    def __init__(
        self,
        pairs: PairStream,
        *,
        batch: int,
        seed: int,
        separator: int,
        source_length: int,
        target_length: int,
        shuffle: bool = True,
    ) -> None:
        """`batch` is the samples of one step on all devices together; the separator also fills rows up."""
        if min(batch, source_length, target_length) < 1:
            raise OptionError(
                f"batch, source and target length must be at least 1, not {batch}, {source_length} and {target_length}"
            )
        self.batch = batch
        self._pairs = pairs
        self._separator = separator
        self._source_length = source_length
        self._target_length = target_length
        self._order = Order(len(pairs), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._order.count

    def samples(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Which pair each of these samples is."""
        return self._order.samples(start, count)

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> Batch:
        """Source and target in one row, with labels on the target only, for a decoder."""
        mine, lengths = self._mine(start, count, rank, world)
        width = round_up(int(lengths.sum(axis=1).max()) - 1)
        tokens_BT = np.full((len(mine), width), self._separator, np.int64)
        targets_BT = np.full((len(mine), width), IGNORE, np.int64)
        keep_BT = np.zeros((len(mine), width), np.bool_)
        for row, (source, target) in enumerate(mine):
            whole = np.concatenate([source, target])
            end = len(whole) - 1
            tokens_BT[row, :end] = whole[:-1]
            keep_BT[row, :end] = True
            targets_BT[row, len(source) - 1 : end] = target
        return Batch(
            tokens_BT=torch.from_numpy(tokens_BT),
            targets_BT=torch.from_numpy(targets_BT),
            keep_BT=torch.from_numpy(keep_BT),
        )

    def seq2seq_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> PairBatch:
        """Source and target apart, for an encoder-decoder."""
        mine, lengths = self._mine(start, count, rank, world)
        S, T = (round_up(int(longest)) for longest in lengths.max(axis=0))
        source_BS = np.full((len(mine), S), self._separator, np.int64)
        keep_BS = np.zeros((len(mine), S), np.bool_)
        targets_BT = np.full((len(mine), T), IGNORE, np.int64)
        for row, (source, target) in enumerate(mine):
            source_BS[row, : len(source)] = source
            keep_BS[row, : len(source)] = True
            targets_BT[row, : len(target)] = target
        return PairBatch(
            source_BS=torch.from_numpy(source_BS),
            source_keep_BS=torch.from_numpy(keep_BS),
            targets_BT=torch.from_numpy(targets_BT),
        )

    def seq2seq(self) -> Seq2SeqLoader:
        """This loader in its other form, for `prefetch`."""
        return Seq2SeqLoader(self)

    def _mine(self, start: int, count: int, rank: int, world: int) -> tuple[list[_Pair], npt.NDArray[np.int64]]:
        """This rank's pairs, cut to length, and the lengths of the whole global batch."""
        numbers = self.samples(start, count)
        chosen = rank_slice(numbers, rank, world)
        limits = np.array([self._source_length, self._target_length])
        lengths = np.minimum([self._pairs.lengths(int(number)) for number in numbers], limits)
        return [self._cut(*self._pairs.pair(int(number))) for number in chosen], lengths

    def _cut(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> _Pair:
        return source[-self._source_length :], target[: self._target_length]


class Seq2SeqLoader:
    """A `PairLoader` whose batches have source and target apart."""

    def __init__(self, pairs: PairLoader) -> None:
        self.batch = pairs.batch
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> PairBatch:
        return self._pairs.seq2seq_at(start, count, rank, world)


def round_up(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE
