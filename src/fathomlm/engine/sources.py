"""Encoder-decoder models: a source is encoded once, when its sequence takes its slot. Its keys and values for every step
are in pages of its own until the sequence leaves; after a preemption it is encoded again.

Shapes: B sources, T tokens of the longest, S slots and the spare one, P pages of a source, N rows, G key-value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.decode.prompts import read_sources
from fathomlm.engine.captured_passes import CapturedPasses
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.paged_write import write_entries
from fathomlm.model.blocks import CrossBlock
from fathomlm.model.seq2seq import FathomForSeq2SeqLM

ROWS, LENGTHS, MOST = (1, 2, 4, 8, 16, 32), (16, 32, 64, 128, 256, 512), 2048
"""Sources and their tokens in passes that are captured, and the most tokens of one: more keep a device busy."""


def captured_size(sources: int, longest: int) -> tuple[int, int] | None:
    """The size of a pass over so many sources, and the tokens of each; None where it is run as it is."""
    rows = next((rows for rows in ROWS if rows >= sources), None)
    length = next((length for length in LENGTHS if length >= longest), None)
    return None if rows is None or length is None or rows * length > MOST else (rows, length)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where each slot's source is."""

    table_SP: Tensor
    lengths_S: Tensor
    nowhere: Tensor
    """Where rows that only look leave their entries."""

    @classmethod
    def build(cls, slots: int, pages: int, device: torch.device) -> Sources:
        table_SP = torch.zeros(slots + 1, pages, dtype=torch.int32, device=device)
        return cls(
            table_SP,
            torch.zeros(slots + 1, dtype=torch.int32, device=device),
            torch.full((1,), -1, dtype=torch.int64, device=device),
        )

    def rows(self, placements: Sequence[Placement]) -> list[list[int]]:
        """What `place` takes of new sequences: how long each source is, and its pages."""
        each, pages = (placement.sequence for placement in placements), self.table_SP.shape[1]
        return [[len(one.source), *one.source_pages, *[0] * (pages - len(one.source_pages))] for one in each]

    def place(self, slots_K: Tensor, rows_KC: Tensor) -> None:
        self.lengths_S.index_copy_(0, slots_K, rows_KC[:, 0].to(self.lengths_S.dtype))
        self.table_SP.index_copy_(0, slots_K, rows_KC[:, 1:].to(self.table_SP.dtype))

    def seen(self, attention: AttentionMetadata, offset_N: Tensor | None, planes: int) -> AttentionMetadata:
        """What rows look at: all of their slot's source, and nothing where they stand for nothing. `offset_N` is added to
        page numbers, for rows at other steps."""
        assert attention.slots_N is not None
        table_NP = self.table_SP[attention.slots_N]
        if offset_N is not None:
            table_NP = table_NP + offset_N[:, None].to(table_NP.dtype)
        lengths_N = torch.where(attention.lengths_N > 0, self.lengths_S[attention.slots_N], 0)
        return AttentionMetadata(self.nowhere.expand(len(table_NP)), table_NP, lengths_N, planes=planes)


class SourceReader:
    def __init__(
        self, model: FathomForSeq2SeqLM, pages: KVPages, sources: Sources, most: int,
        upload: Callable[[Sequence[object]], Tensor], *, captures: bool,
    ) -> None:  # fmt: skip
        """At most `most` tokens are encoded at a time, padding included, unless one source has more. `upload` does not wait
        for the device. With `captures` a few short sources are read as a pass of one of a few sizes, which is captured: an
        encoder is launched kernel by kernel, which takes the host longer than the device (translations one at a time take
        0.57 of the time)."""
        self.model, self.pages, self.sources, self._most, self._upload = model, pages, sources, most, upload
        self.short: CapturedPasses | None = None
        if captures and model.encodes_padded:
            self.short = CapturedPasses(self._read_padded, captures=True)

    def read(self, placements: Sequence[Placement]) -> None:
        """Encode the sources of new sequences, whose pages are in the table."""
        for group in self._groups(sorted(placements, key=lambda placement: len(placement.sequence.source))):
            sources, slots = [one.sequence.source for one in group], [one.slot for one in group]
            if self.short is not None and (size := captured_size(len(sources), max(map(len, sources)))):
                self.short(self._padded(sources, slots, *size), size)
            else:
                self._store(read_sources(self.model, sources).states_BSM, self._upload(slots))

    def _padded(self, sources: Sequence[Sequence[int]], slots: Sequence[int], rows: int, length: int) -> Tensor:
        """Each source behind its slot; rows that stand for nothing have the spare slot, whose source has no tokens."""
        lines = [[slot, *source, *[0] * (length - len(source))] for slot, source in zip(slots, sources, strict=True)]
        nothing = [len(self.sources.lengths_S) - 1, *[0] * length]
        return self._upload([*lines, *[nothing] * (rows - len(lines))])

    @torch.inference_mode()
    def _read_padded(self, given_BC: Tensor) -> None:
        slots_B, tokens_BT = given_BC[:, 0], given_BC[:, 1:]
        self._store(self.model.encode_padded(tokens_BT, self.sources.lengths_S[slots_B]), slots_B)

    def _store(self, states_BTM: Tensor, slots_B: Tensor) -> None:
        """Every step's keys and values of what the encoder made."""
        slots_N, decoder = self._places(slots_B, states_BTM.shape[1]), self.model.decoder
        for step in decoder.plan:
            layer = decoder.layer_of(step)
            assert isinstance(layer, CrossBlock)
            made = layer.cross.entries(states_BTM, decoder.delta(step))
            k_NGD, v_NGD = (entries.transpose(1, 2).flatten(0, 1).contiguous() for entries in made)
            write_entries(k_NGD, v_NGD, *self.pages.at(0, step.index), slots_N)

    def _groups(self, placements: Sequence[Placement]) -> Iterator[list[Placement]]:
        """Sources of about one length, as many as may be encoded at once."""
        group: list[Placement] = []
        for placement in placements:
            if group and (len(group) + 1) * len(placement.sequence.source) > self._most:
                yield group
                group = []
            group.append(placement)
        yield group

    def _places(self, slots_B: Tensor, longest: int) -> Tensor:
        """Where each token's entry goes, in whatever plane; -1 for padding, which may go on behind the table."""
        size = self.pages.page_size
        at_T = torch.arange(longest, device=slots_B.device)
        page_T = (at_T // size).clamp_max(self.sources.table_SP.shape[1] - 1)
        places_BT = self.sources.table_SP[slots_B][:, page_T].long() * size + at_T % size
        return torch.where(at_T < self.sources.lengths_S[slots_B][:, None], places_BT, -1).flatten()
