"""Encoder-decoder models: a source is encoded once, when its sequence takes its slot. Its keys and values for every step
are in pages of its own until the sequence leaves; after a preemption it is encoded again.

Shapes: B sources, T tokens of the longest, S slots and the spare one, P pages of a source, N rows, G key-value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.decode.prompts import read_sources
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.paged_write import write_entries
from fathomlm.model.blocks import CrossBlock
from fathomlm.model.seq2seq import FathomForSeq2SeqLM


@dataclass(frozen=True, slots=True)
class Sources:
    """Where each slot's source is."""

    table_SP: Tensor
    lengths_S: Tensor

    @classmethod
    def build(cls, slots: int, pages: int, device: torch.device) -> Sources:
        table_SP = torch.zeros(slots + 1, pages, dtype=torch.int32, device=device)
        return cls(table_SP, torch.zeros(slots + 1, dtype=torch.int32, device=device))

    def rows(self, placements: Sequence[Placement]) -> list[list[int]]:
        """New rows of the table."""
        pages = [placement.sequence.source_pages for placement in placements]
        return [[*given, *[0] * (self.table_SP.shape[1] - len(given))] for given in pages]

    def seen(self, attention: AttentionMetadata, offset_N: Tensor | None, planes: int) -> AttentionMetadata:
        """What rows look at: all of their slot's source, and nothing where they stand for nothing. `offset_N` is added to
        page numbers, for rows at other steps."""
        assert attention.slots_N is not None
        table_NP = self.table_SP[attention.slots_N]
        if offset_N is not None:
            table_NP = table_NP + offset_N[:, None].to(table_NP.dtype)
        lengths_N = torch.where(attention.lengths_N > 0, self.lengths_S[attention.slots_N], 0)
        return AttentionMetadata(torch.full_like(attention.slot_mapping_N, -1), table_NP, lengths_N, planes=planes)


class SourceReader:
    def __init__(self, model: FathomForSeq2SeqLM, pages: KVPages, sources: Sources, most: int) -> None:
        """At most `most` tokens are encoded at a time, padding included, unless one source has more."""
        self.model, self.pages, self.sources, self._most = model, pages, sources, most

    def read(self, placements: Sequence[Placement]) -> None:
        """Encode the sources of new sequences, whose pages are in the table."""
        for group in self._groups(sorted(placements, key=lambda placement: len(placement.sequence.source))):
            states_BTM = read_sources(self.model, [placement.sequence.source for placement in group]).states_BSM
            slots_N = self._places(group, states_BTM)
            decoder = self.model.decoder
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

    def _places(self, group: Sequence[Placement], states_BTM: Tensor) -> Tensor:
        """Where each token's entry goes, in whatever plane; -1 for padding."""
        size, device = self.pages.page_size, states_BTM.device
        slots_B = torch.tensor([placement.slot for placement in group], device=device)
        at_T = torch.arange(states_BTM.shape[1], device=device)
        places_BT = self.sources.table_SP[slots_B][:, at_T // size].long() * size + at_T % size
        return torch.where(at_T < self.sources.lengths_S[slots_B][:, None], places_BT, -1).flatten()
