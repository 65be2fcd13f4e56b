"""Paged attention on a CPU: pages are gathered, and torch's own kernel does the rest.

What rows see, and where they leave their own entry, is the same at every layer of a forward pass: it is worked out once. A
row that is alone, and rows of one sequence while its prompt is read, gather just the entries that they see: nothing where
their pages lie side by side. Rows of several sequences gather as many as the longest has, and a mask hides the rest.
`plain_paged_attention` is the meaning.

Shapes: N rows, H query heads, G key-value heads, D head width, P pages of a table, E entries, B sequences, T rows of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
from torch import Tensor

from fathomlm.kernels.attention import attention
from fathomlm.kernels.attention_blocks import NO_PREFIX, PrefixSpan


@dataclass(frozen=True, slots=True)
class Seen:
    """What some rows see, (B, T) of them: of B sequences one row each, or T of one."""

    first: int
    many: int
    sequences: int
    pages: slice | Tensor
    """Where their entries are, B times as many pages."""
    entries: slice
    """Of those that were gathered of a sequence."""
    mask: Tensor | None
    """(B, 1 or H, T, E): whether it is seen, or what is added to its score; None where all of it is seen."""
    hidden: bool = False
    """Whether something was gathered that is not its sequence's."""


@dataclass(slots=True)
class GatheredPages:
    """For rows that all see something. `sequence_N` says which have the same table, where those stand together."""

    table_NP: Tensor
    lengths: list[int]
    page_size: int
    sequence_N: Tensor | None = None
    slot_mapping_N: Tensor | None = None
    """Where rows leave their entry, -1 where they leave none."""
    prefix: PrefixSpan = NO_PREFIX
    _seen: dict[tuple[int | None, bool, int | None], tuple[list[Seen], Tensor | None]] = field(default_factory=dict)
    """With the starts that it is true of: as long as they are kept, no others have their id."""
    _places: dict[int, Tensor] = field(default_factory=dict)
    turns: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines of the rows' positions, as layers take them, by how a layer turns (`engine.row_positions`)."""

    def attend(
        self, q_NH1D: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, window: int | None, bias_DH: Tensor | None,
        starts_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """What the rows find, (N, H, 1, D), as `paged_attention`. Pages are in the data type of the queries. Starts stay as
        they are during a pass."""
        key = (window, bias_DH is not None, None if starts_N is None else id(starts_N))
        if key not in self._seen:
            self._seen[key] = self._parts(self._starts(window, starts_N), bias_DH, q_NH1D.dtype), starts_N
        parts, _ = self._seen[key]
        if len(parts) == 1:
            return _attend(q_NH1D, k_pages, v_pages, parts[0], scale)
        return torch.cat(
            [_attend(q_NH1D[part.first : part.first + part.many], k_pages, v_pages, part, scale) for part in parts]
        )

    def store(self, k_NGD: Tensor, v_NGD: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """As `write_entries`."""
        assert self.slot_mapping_N is not None
        spare = k_pages.shape[0] * self.page_size - 1  # of this pool
        if spare not in self._places:
            self._places[spare] = torch.where(self.slot_mapping_N < 0, spare, self.slot_mapping_N).long()
        for new_NGD, pages in ((k_NGD, k_pages), (v_NGD, v_pages)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self._places[spare], new_NGD)

    def _starts(self, window: int | None, starts_N: Tensor | None) -> list[int]:
        """The first entry that each row sees, or the first behind the prefix, where it does not see all of those."""
        if starts_N is not None:
            found: list[int] = starts_N.tolist()
        else:
            found = [0 if window is None else max(0, length - window) for length in self.lengths]
        return [start if start > self.prefix.end else self.prefix.first for start in found]

    def _parts(self, starts: list[int], bias_DH: Tensor | None, dtype: torch.dtype) -> list[Seen]:
        if self.sequence_N is None and len(self.lengths) > 1:
            return [self._of_rows(starts, bias_DH, dtype)]
        counts = [len(self.lengths)]
        if self.sequence_N is not None:
            counts = [len(list(rows)) for _, rows in groupby(self.sequence_N.tolist())]
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        return [self._of_sequence(*part, starts, bias_DH, dtype) for part in zip(firsts, counts, strict=True)]

    def _of_sequence(self, row: int, many: int, starts: list[int], bias_DH: Tensor | None, dtype: torch.dtype) -> Seen:
        """Rows with one table: its pages are gathered once, from the first that is seen."""
        size, lengths, starts = self.page_size, self.lengths[row : row + many], starts[row : row + many]
        end, first = max(lengths), min(starts)
        if self.prefix.end and max(starts) > self.prefix.end:
            return self._behind_prefix(row, many, starts, bias_DH, dtype)
        here = self.table_NP[row, first // size : -(-end // size)].tolist()
        beside = all(after == page + 1 for page, after in pairwise(here))
        assert min(here) >= 0, f"a row looks at page {min(here)}"
        mask = None
        if many > 1 or bias_DH is not None:
            mask = _mask(lengths, torch.arange(first, end), starts, bias_DH, dtype, self.prefix).transpose(0, 2)
        pages = slice(here[0], here[-1] + 1) if beside else torch.tensor(here)
        return Seen(row, many, 1, pages, slice(first % size, first % size + end - first), mask)

    def _behind_prefix(self, row: int, many: int, starts: list[int], bias_DH: Tensor | None, dtype: torch.dtype) -> Seen:
        """The same, where windows begin behind the prefix: its pages, and those from the first window on."""
        size, lengths, front = self.page_size, self.lengths[row : row + many], self.prefix.end
        end, first = max(lengths), min(max(start, front) for start in starts) // size
        here_P = torch.cat((self.table_NP[row, : front // size], self.table_NP[row, first : -(-end // size)])).long()
        assert int(here_P.min()) >= 0, f"a row looks at page {int(here_P.min())}"
        entry_E = torch.cat((torch.arange(front), torch.arange(first * size, end)))
        mask = _mask(lengths, entry_E, starts, bias_DH, dtype, self.prefix).transpose(0, 2)
        return Seen(row, many, 1, here_P, slice(0, len(entry_E)), mask)

    def _of_rows(self, starts: list[int], bias_DH: Tensor | None, dtype: torch.dtype) -> Seen:
        """Rows of different tables, as far as the longest goes."""
        size, lengths, end = self.page_size, self.lengths, max(self.lengths)
        pages = -(-end // size)
        here_NP = self.table_NP[:, :pages].long()
        if min(lengths) <= (pages - 1) * size:  # behind a row's last page its table may say anything
            used_N1 = torch.tensor([[-(-length // size)] for length in lengths])
            here_NP = torch.where(torch.arange(pages) < used_N1, here_NP, here_NP[:, :1])
        hidden = any(starts) or min(lengths) < end
        masks = hidden or bias_DH is not None
        mask = _mask(lengths, torch.arange(end), starts, bias_DH, dtype, self.prefix) if masks else None
        return Seen(0, len(lengths), len(lengths), here_NP.flatten(), slice(0, end), mask, hidden)


def _attend(q_NH1D: Tensor, k_pages: Tensor, v_pages: Tensor, seen: Seen, scale: float) -> Tensor:
    rows = seen.sequences == seen.many  # one of each sequence
    q_BHTD = q_NH1D if rows else q_NH1D.permute(2, 1, 0, 3)
    k_BGED, v_BGED = _gathered(k_pages, seen), _gathered(v_pages, seen)
    mixed = attention(q_BHTD, k_BGED, v_BGED, scale=scale, mask=seen.mask, causal=False)
    if seen.hidden and bool(mixed.isnan().any()):  # what others left must be numbers too: a weight of 0 does not hide it
        assert seen.mask is not None
        unseen = ~seen.mask if seen.mask.dtype == torch.bool else seen.mask[:, :1] == -torch.inf
        k_BGED, v_BGED = (entries.masked_fill(unseen.transpose(2, 3), 0.0) for entries in (k_BGED, v_BGED))
        mixed = attention(q_BHTD, k_BGED, v_BGED, scale=scale, mask=seen.mask, causal=False)
    return mixed if rows else mixed.permute(2, 1, 0, 3)


def _gathered(pages: Tensor, seen: Seen) -> Tensor:
    if isinstance(seen.pages, slice):  # side by side: one view in place of four, of as many tensors as a pass has layers
        _, size, G, D = pages.shape
        first = seen.pages.start * size + seen.entries.start
        shape, strides = (1, G, seen.entries.stop - seen.entries.start, D), (0, D, G * D, 1)
        return pages.as_strided(shape, strides, pages.storage_offset() + first * G * D)
    here = pages.index_select(0, seen.pages)
    return here.view(seen.sequences, -1, *pages.shape[2:])[:, seen.entries].transpose(1, 2)


def _mask(
    lengths: list[int], entry_E: Tensor, starts: list[int], bias_DH: Tensor | None, dtype: torch.dtype, prefix: PrefixSpan
) -> Tensor:
    """What each row sees, (N, 1 or H, 1, E): whether, or where there is a bias, what is added to the scores."""
    back_NE = torch.tensor(lengths)[:, None] - 1 - entry_E
    seen_NE = back_NE >= 0
    if any(starts):
        front_E = (entry_E >= prefix.first) & (entry_E < prefix.end)
        seen_NE = seen_NE & (front_E | (entry_E >= torch.tensor(starts)[:, None]))
    if bias_DH is None:
        return seen_NE[:, None, None]
    bias_NEH = bias_DH[back_NE.clamp(0, len(bias_DH) - 1)].to(dtype).masked_fill((entry_E < prefix.end)[:, None], 0.0)
    return bias_NEH.masked_fill(~seen_NE[..., None], -torch.inf).transpose(1, 2)[:, :, None].contiguous()
