"""The KV cache in pages: keys and values of every plane, and one page more in each plane, which nobody reads. In front of
that one there may be pages of a trained prefix, which every sequence reads and none is given.

Shapes: L planes, P pages, E entries of a page, G key-value heads, D head width; N tokens of a batch, S slots, T tables of a
slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fathomlm.depth import Architecture
from fathomlm.engine.layout import Layout
from fathomlm.engine.options import KvDtype
from fathomlm.engine.schedule import PageCopy
from fathomlm.kernels.gathered_attention import GatheredPages
from fathomlm.kernels.paged_write import FLOAT8, copy_entries, copy_page, write_entries

Windows = tuple[int | None, ...]
"""Of a layer, by the recursion that a row is at; one where all of them have it. None sees everything."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What rows look at, and where they leave their own entry."""

    slot_mapping_N: Tensor
    """Place of the entry in a plane's pages, page x page size + offset; -1 writes nothing."""
    table_NP: Tensor
    lengths_N: Tensor
    """How many entries a row sees, its own included; 0 for a row that stands for nothing."""
    angles: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """Cosines and sines of the rows' positions, (N, D) each, where they are known already."""
    planes: int = field(default=1, kw_only=True)
    """How many planes the page numbers lead through, from a step's own on: more than one where rows look at the entries of
    different recursions (`attention_for`'s `offset_N`)."""
    sequence_N: Tensor | None = field(default=None, kw_only=True)
    """Where prompts are read: the slot of each row. Rows of a sequence stand together, and see the same entries but for
    those behind them."""
    apart: bool = field(default=False, kw_only=True)
    """Rows are of different sequences, and each that sees anything leaves an entry, the last that it sees."""
    slots_N: Tensor | None = field(default=None, kw_only=True)
    """The slot of each row, for models with an encoder."""
    bits_N: Tensor | None = field(default=None, kw_only=True)
    """Which of its last 64 entries a row sees, its own in the lowest bit, where rows are a tree; None: all."""
    starts: Mapping[Windows, Tensor] = field(default_factory=dict, kw_only=True)
    """The first entry that each row sees at layers with these windows, where it is not as many entries back
    (`row_positions`)."""
    source: AttentionMetadata | None = field(default=None, kw_only=True)
    """What rows look at of what an encoder made."""
    gathered: GatheredPages | None = field(default=None, kw_only=True)
    """On a CPU: the same for all layers of a forward pass, worked out once."""

    def gathering(self, page_size: int) -> AttentionMetadata:
        """For rows that all see something."""
        gathered = GatheredPages(self.table_NP, self.lengths_N.tolist(), page_size, self.sequence_N, self.slot_mapping_N)
        source = None if self.source is None else self.source.gathering(page_size)
        return replace(self, gathered=gathered, source=source)

    def rows(self, at_K: Tensor) -> AttentionMetadata:
        """Of some rows."""
        return AttentionMetadata(
            self.slot_mapping_N[at_K], self.table_NP[at_K], self.lengths_N[at_K],
            angles=None if self.angles is None else (self.angles[0][at_K], self.angles[1][at_K]), planes=self.planes,
            sequence_N=None if self.sequence_N is None else self.sequence_N[at_K],
            apart=self.apart, slots_N=None if self.slots_N is None else self.slots_N[at_K],
            bits_N=None if self.bits_N is None else self.bits_N[at_K],
            source=None if self.source is None else self.source.rows(at_K),
        )  # fmt: skip


def attention_for(
    tables_STP: Tensor,
    rows_N: Tensor,
    table_N: Tensor,
    ranks_N: Tensor,
    valid_N: Tensor,
    page_size: int,
    writes_N: Tensor | None = None,
    offset_N: Tensor | None = None,
    *,
    together: bool = False,
) -> AttentionMetadata:
    """For rows whose entry is number `ranks_N` of a table of theirs: they see that one and all before it.

    `writes_N` is False where another row or step makes the entry; `offset_N` is added to page numbers, for rows that look
    at other planes than the first row does. `together`: rows of a slot stand together, as where prompts are read.
    """
    table_NP = tables_STP[rows_N, table_N]
    if offset_N is not None:
        table_NP = table_NP + offset_N[:, None].to(table_NP.dtype)
    page_N = table_NP.gather(1, (ranks_N // page_size)[:, None].clamp_max(table_NP.shape[1] - 1))[:, 0].long()
    slot_mapping_N = page_N * page_size + ranks_N % page_size
    writes_N = valid_N if writes_N is None else valid_N & writes_N
    slot_mapping_N = torch.where(writes_N, slot_mapping_N, -1)
    lengths_N = torch.where(valid_N, ranks_N + 1, 0).to(torch.int32)
    sequence_N = rows_N if together else None
    return AttentionMetadata(slot_mapping_N, table_NP, lengths_N, sequence_N=sequence_N, slots_N=rows_N)


class KVPages:
    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        pool_pages: Sequence[int],
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        prefix: int = 0,
    ) -> None:
        """`prefix` is how many pages a trained prefix has."""
        self.page_size, self.dtype, self.prefix = page_size, dtype, prefix
        shape = (page_size, architecture.kv_heads, architecture.head_dim)
        self._pools = [
            tuple(torch.zeros(planes, pages + prefix + 1, *shape, device=device, dtype=dtype) for _ in range(2))
            for planes, pages in zip(layout.planes, pool_pages, strict=True)
        ]
        self.positions = {
            pool: torch.zeros(pool_pages[pool] + prefix + 1, page_size, device=device, dtype=torch.int32)
            for pool in layout.positioned
        }
        """By pool, where the entries' positions are kept: those of a page beside it (`kernels.entry_positions`)."""
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def at(self, pool: int, plane: int, planes: int = 1) -> tuple[Tensor, Tensor]:
        """Pages of a plane, and of as many behind it as rows may be led to by an offset (`AttentionMetadata.planes`).
        Kernels address nothing outside what they are given."""
        if (found := self._views.get((pool, plane, planes))) is None:
            k, v = self._pools[pool]
            right = 0 <= plane < plane + planes <= len(k)
            assert right, f"planes {plane} to {plane + planes - 1} of {len(k)} in pool {pool}"
            found = k[plane : plane + planes].flatten(0, 1), v[plane : plane + planes].flatten(0, 1)
            self._views[pool, plane, planes] = found
        return found

    def stride(self, pool: int) -> int:
        """From a page of one plane to the same page of the next."""
        return self._pools[pool][0].shape[1]

    def behind_prefix(self, attention: AttentionMetadata) -> AttentionMetadata:
        """What rows look at, the prefix of their step first. A row's page numbers lead to its planes, and say so."""
        table_NP, (stride, first) = attention.table_NP, (self.stride(0), self.stride(0) - 1 - self.prefix)
        own_N = table_NP[:, :1].div(stride, rounding_mode="floor") * stride
        pages = torch.arange(first, first + self.prefix, dtype=table_NP.dtype, device=table_NP.device)
        lengths_N = attention.lengths_N
        more_N = torch.where(lengths_N > 0, lengths_N + self.prefix * self.page_size, 0)
        return replace(attention, table_NP=torch.cat((own_N + pages, table_NP), 1), lengths_N=more_N)

    def store_prefix(self, pool: int, plane: int, k_PGD: Tensor, v_PGD: Tensor) -> None:
        """A step's prefix, into its pages."""
        first = (self.stride(pool) - 1 - self.prefix) * self.page_size
        slots_P = torch.arange(first, first + len(k_PGD), device=k_PGD.device)
        write_entries(k_PGD, v_PGD, *self.at(pool, plane), slots_P)

    def check(self, pool: int, attention: AttentionMetadata) -> None:
        """Assert that rows see and write only pages that are handed out, in planes that are theirs. It asks the device, so
        it is for CPUs, where that costs nothing; what is asserted of a program there holds for its twin on a GPU."""
        stride, pages, given = self.stride(pool), attention.table_NP.shape[1], self.stride(pool) - 1 - self.prefix
        lengths_N, table_NP, slots_N = (
            tensor.numpy() for tensor in (attention.lengths_N, attention.table_NP, attention.slot_mapping_N)
        )
        longest = int(lengths_N.max())
        assert longest <= pages * self.page_size, f"a row sees {longest} entries through a table of {pages} pages"
        firsts_P = np.arange(0, longest, self.page_size)
        seen = table_NP[:, : len(firsts_P)][firsts_P < lengths_N[:, None]]
        written = slots_N[slots_N != -1] // self.page_size
        for named, does in ((seen, "sees"), (written, "writes")):
            inside = (named >= 0) & (named < attention.planes * stride) & (named % stride < given)
            assert inside.all(), f"a row {does} page {named[~inside][0]} of {attention.planes} plane(s) of {given} pages"

    def copy(self, order: PageCopy) -> None:
        handed_out = range(self.stride(order.pool) - 1 - self.prefix)
        assert order.source in handed_out, f"page {order.source} of {len(handed_out)} is copied from"
        assert order.target in handed_out, f"page {order.target} of {len(handed_out)} is copied to"
        for pages in self._pools[order.pool]:
            copy_page(pages, order.source, order.target)
        if (positions := self.positions.get(order.pool)) is not None:
            positions[order.target].copy_(positions[order.source])

    def repeat(self, pool: int, planes_RL: Tensor, slots_N: Tensor, recursion_N: Tensor) -> None:
        """Entries that a row's last recursion made, once more for each later one (`copy_entries`)."""
        k, v = self._pools[pool]
        copy_entries(k, v, planes_RL, slots_N, recursion_N)

    def move(self, pool: int, source_N: Tensor, target_N: Tensor) -> None:
        """Entries of every plane from one place to another, all at once; a negative target is none."""
        for pages in self._pools[pool]:
            flat = (pages.view(torch.uint8) if pages.dtype == FLOAT8 else pages).flatten(1, 2)
            moved = flat.index_select(1, source_N.clamp_min(0))
            flat.index_copy_(1, torch.where(target_N < 0, flat.shape[1] - 1, target_N), moved)

    @property
    def bytes(self) -> int:
        """The spare pages left out."""
        beside = sum(t[:-1].numel() * t.element_size() for t in self.positions.values())
        return beside + sum(t[:, :-1].numel() * t.element_size() for pair in self._pools for t in pair)


def entry_dtype(kv_dtype: KvDtype, weights: torch.dtype) -> torch.dtype:
    """What pages hold, of a model with such weights. Float8 entries are those of the kernels at scale 1: what does not fit
    is cut off at the largest number."""
    return FLOAT8 if kv_dtype == "fp8" else weights


def pool_page_bytes(architecture: Architecture, layout: Layout, page_size: int, dtype: torch.dtype) -> list[int]:
    """What one page of each pool takes, with the positions of its entries where they are kept."""
    return [
        page_bytes(architecture, planes, page_size, dtype) + (pool in layout.positioned) * page_size * torch.int32.itemsize
        for pool, planes in enumerate(layout.planes)
    ]


def page_bytes(architecture: Architecture, planes: int, page_size: int, dtype: torch.dtype) -> int:
    """What the entries of one page take."""
    return planes * page_size * architecture.kv_bytes(dtype.itemsize)
