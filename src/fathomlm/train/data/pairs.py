"""Batches of pairs, a source text and what is to be made of it, for decoders and for encoder-decoders.

The order is that of `loader.SampleOrder`, so all that is said there of resuming and of devices holds. Rows are padded to the
longest of the *global* batch: how a batch is split over devices and micro-batches changes nothing in it.

Shapes: B rows of this device, S source positions, T target (or all) positions.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch

from fathomlm.errors import OptionError
from fathomlm.train.data.corpus import PairStream
from fathomlm.train.data.loader import IGNORE, Batch, SampleOrder, rank_slice

MULTIPLE = 8
"""Widths are rounded up to this, which is what matrix units like."""

_Pair = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class PairLoader:
    """Each pair once an epoch. Long targets lose their end; long sources lose their beginning before a decoder, which goes
    on from where they end, and their end before an encoder, as T5's do, whose task stands in front.

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
        widths: int | None = None,
    ) -> None:
        """`batch` is the samples of one step on all devices together; the separator also fills rows up. `widths` is how
        many different widths rows may be padded to, where a compiler would make code for each."""
        if min(batch, source_length, target_length) < 1:
            raise OptionError(
                f"batch, source and target length must be >= 1, not {batch}, {source_length} and {target_length}"
            )
        self.batch = batch
        self._pairs = pairs
        self._separator = separator
        self._source_length = source_length
        self._target_length = target_length
        self._widths = widths
        self._first: int | None = None
        self._order = SampleOrder(len(pairs), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._order.count

    def samples(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Which pair each of these samples is."""
        return self._order.samples(start, count)

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> Batch:
        """Source and target in one row, with labels on the target only, for a decoder; apart in the form of `seq2seq`."""
        if self._first is not None:
            return self._seq2seq_at(start, count, rank, world, self._first)
        mine, lengths = self._mine(start, count, rank, world)
        width = self._width(int(lengths.sum(axis=1).max()) - 1, self._source_length + self._target_length)
        tokens_BT = np.full((len(mine), width), self._separator, np.int64)
        targets_BT = np.full((len(mine), width), IGNORE, np.int64)
        keep_BT = np.zeros((len(mine), width), np.bool_)
        for row, (source, target) in enumerate(mine):
            source = source[-self._source_length :]
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

    def _seq2seq_at(self, start: int, count: int, rank: int, world: int, first: int) -> Batch:
        """The source ends with the separator too, as T5 was taught."""
        mine, lengths = self._mine(start, count, rank, world, behind_source=1)
        longest_S, longest_T = (int(longest) for longest in lengths.max(axis=0))
        S, T = self._width(longest_S, self._source_length), self._width(longest_T, self._target_length)
        source_BS = np.full((len(mine), S), self._separator, np.int64)
        keep_BS = np.zeros((len(mine), S), np.bool_)
        tokens_BT = np.full((len(mine), T), first, np.int64)
        targets_BT = np.full((len(mine), T), IGNORE, np.int64)
        for row, (source, target) in enumerate(mine):
            source = source[: self._source_length - 1]  # the row is full of separators: one stays behind the source
            source_BS[row, : len(source)] = source
            keep_BS[row, : len(source) + 1] = True
            tokens_BT[row, 1 : len(target)] = target[:-1]
            targets_BT[row, : len(target)] = target
        return Batch(
            source_BS=torch.from_numpy(source_BS),
            source_keep_BS=torch.from_numpy(keep_BS),
            tokens_BT=torch.from_numpy(tokens_BT),
            targets_BT=torch.from_numpy(targets_BT),
        )

    def seq2seq(self, first: int | None = None) -> PairLoader:
        """This loader with source and target apart, for an encoder-decoder; `first` is what the decoder reads first, the
        separator unless given."""
        other = copy.copy(self)
        other._first = self._separator if first is None else first
        return other

    def _mine(
        self, start: int, count: int, rank: int, world: int, behind_source: int = 0
    ) -> tuple[list[_Pair], npt.NDArray[np.int64]]:
        """This rank's pairs, targets cut to length, and the lengths of the whole global batch, cut, with so many more
        tokens behind each source."""
        numbers = self.samples(start, count)
        chosen = (self._pairs.pair(int(number)) for number in rank_slice(numbers, rank, world))
        limits = np.array([self._source_length, self._target_length])
        lengths = np.array([self._pairs.lengths(int(number)) for number in numbers])
        lengths[:, 0] += behind_source
        return [(source, target[: self._target_length]) for source, target in chosen], np.minimum(lengths, limits)

    def _width(self, longest: int, limit: int) -> int:
        multiple = MULTIPLE if self._widths is None else round_up(-(-limit // self._widths))
        return min(round_up(longest, multiple), round_up(max(limit, longest)))


def round_up(width: int, multiple: int = MULTIPLE) -> int:
    return -(-width // multiple) * multiple
