"""The KV cache in pages: keys and values of every plane, and one page more in each plane, which nobody reads. In front of
that one there may be pages of trained prefixes, which every sequence reads and none is given: one prefix for each step that
looks at entries of the plane. It ends with a page, so that a sequence's own entries follow it, and may begin inside one.

Shapes: L planes, P pages, E entries of a page, G key-value heads, H query heads, D head width; N tokens of a batch, S slots,
T tables of a slot.
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
from fathomlm.kernels.attention_blocks import NO_PREFIX, PrefixSpan
from fathomlm.kernels.gathered_attention import GatheredPages
from fathomlm.kernels.paged_attention import paged_attention
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
    slots_N: Tensor | None = field(default=None, kw_only=True)
    """The slot of each row, for models with an encoder."""
    bits_N: Tensor | None = field(default=None, kw_only=True)
    """Which of its last 64 entries a row sees, its own in the lowest bit, where rows are a tree; None: all."""
    together: tuple[int, int] | None = field(default=None, kw_only=True)
    """Where rows are drafts: so many of them stand behind each other that have the same table, and so many entries in front
    of the last one are not seen by all of them alike (`few_attention`)."""
    starts: Mapping[Windows, Tensor] = field(default_factory=dict, kw_only=True)
    """The first entry that each row sees at layers with these windows, where it is not as many entries back
    (`row_positions`)."""
    source: AttentionMetadata | None = field(default=None, kw_only=True)
    """What rows look at of what an encoder made."""
    back_NE: Tensor | None = field(default=None, kw_only=True)
    """How many positions in front of its row each entry is, for relative positions, where it is not as many entries."""
    prefix: PrefixSpan = field(default=NO_PREFIX, kw_only=True)
    """Entries in front of a row's own, counted in `lengths_N` and `starts`."""
    gathered: GatheredPages | None = field(default=None, kw_only=True)
    """On a CPU: the same for all layers of a forward pass, worked out once."""

    def gathering(self, page_size: int) -> AttentionMetadata:
        """For rows that all see something."""
        gathered = GatheredPages(
            self.table_NP, self.lengths_N.tolist(), page_size, self.sequence_N, self.slot_mapping_N, self.prefix
        )
        source = None if self.source is None else self.source.gathering(page_size)
        return replace(self, gathered=gathered, source=source)

    def rows(self, at_K: Tensor) -> AttentionMetadata:
        """Of some rows."""
        return AttentionMetadata(
            self.slot_mapping_N[at_K], self.table_NP[at_K], self.lengths_N[at_K],
            angles=None if self.angles is None else (self.angles[0][at_K], self.angles[1][at_K]), planes=self.planes,
            sequence_N=None if self.sequence_N is None else self.sequence_N[at_K],
            slots_N=None if self.slots_N is None else self.slots_N[at_K],
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
        """`prefix` is how many entries a trained prefix has."""
        self.page_size, self.dtype, pages = page_size, dtype, -(-prefix // page_size)
        self.prefix = PrefixSpan(pages * page_size - prefix, pages * page_size)
        numbers = layout.prefix_numbers()
        prefixes = [
            1 + max((numbers[index] for index, (home, _) in layout.homes.items() if home == pool), default=0)
            for pool in range(len(layout.planes))
        ]
        self._given = tuple(pool_pages)
        held = [given + many * pages + 1 for given, many in zip(pool_pages, prefixes, strict=True)]
        shape = (page_size, architecture.kv_heads, architecture.head_dim)
        self._pools = [
            tuple(torch.zeros(planes, pages, *shape, device=device, dtype=dtype) for _ in range(2))
            for planes, pages in zip(layout.planes, held, strict=True)
        ]
        self.positions = {
            pool: torch.zeros(held[pool], page_size, device=device, dtype=torch.int32) for pool in layout.positioned
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

    def behind_prefix(self, pool: int, attention: AttentionMetadata, number: Tensor | int) -> AttentionMetadata:
        """What rows look at, the prefix of their step first: of those in its plane, number `number`, (N, 1) where rows
        differ. A row's page numbers lead to its planes, and say so."""
        table_NP, stride, pages = attention.table_NP, self.stride(pool), self.prefix.end // self.page_size
        own_N1 = table_NP[:, :1].div(stride, rounding_mode="floor") * stride + (self._given[pool] + number * pages)
        pages_P = torch.arange(pages, dtype=table_NP.dtype, device=table_NP.device)
        front_NP = (own_N1 + pages_P).to(table_NP.dtype)
        lengths_N, more = attention.lengths_N, self.prefix.end
        return replace(
            attention, table_NP=torch.cat((front_NP, table_NP), 1), prefix=self.prefix,
            lengths_N=torch.where(lengths_N > 0, lengths_N + more, 0),
            starts={windows: starts_N + more for windows, starts_N in attention.starts.items()},
        )  # fmt: skip

    def store_prefix(self, pool: int, plane: int, number: int, k_PGD: Tensor, v_PGD: Tensor) -> None:
        """A step's prefix, into its pages."""
        first = self._given[pool] * self.page_size + number * self.prefix.end + self.prefix.first
        slots_P = torch.arange(first, first + len(k_PGD), device=k_PGD.device)
        write_entries(k_PGD, v_PGD, *self.at(pool, plane), slots_P)

    def check(self, pool: int, attention: AttentionMetadata) -> None:
        """Assert that rows see and write only pages that are handed out, in planes that are theirs. It asks the device, so
        it is for CPUs, where that costs nothing; what is asserted of a program there holds for its twin on a GPU."""
        stride, pages, given = self.stride(pool), attention.table_NP.shape[1], self._given[pool]
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
        handed_out = range(self._given[order.pool])
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

    def planes(self, pool: int) -> tuple[int, tuple[Tensor, Tensor]]:
        """How many planes a pool has, and the pages of all of them, one behind the other; entries of a byte as bytes."""
        k, v = (pages.view(torch.uint8) if pages.dtype == FLOAT8 else pages for pages in self._pools[pool])
        return len(k), (k.flatten(0, 1), v.flatten(0, 1))

    @property
    def bytes(self) -> int:
        """The spare pages left out."""
        beside = sum(t[:-1].numel() * t.element_size() for t in self.positions.values())
        return beside + sum(t[:, :-1].numel() * t.element_size() for pair in self._pools for t in pair)


@dataclass(frozen=True, slots=True)
class StepKVPages:
    """What a block's attention asks of the pages, at one step."""

    k_pages: Tensor
    v_pages: Tensor
    attention: AttentionMetadata
    window: int | None = None
    starts_N: Tensor | None = None
    reads: bool = field(kw_only=True)
    """The entries are another step's; this one makes none."""
    bias_DH: Tensor | None = None
    source: StepKVPages | None = None

    def store(self, entries: tuple[Tensor, Tensor]) -> None:
        k_NG1D, v_NG1D = entries
        if self.attention.gathered is not None:
            self.attention.gathered.store(k_NG1D[:, :, 0], v_NG1D[:, :, 0], self.k_pages, self.v_pages)
            return
        k_NGD, v_NGD = k_NG1D[:, :, 0].contiguous(), v_NG1D[:, :, 0].contiguous()
        write_entries(k_NGD, v_NGD, self.k_pages, self.v_pages, self.attention.slot_mapping_N)

    def attend(self, q_NH1D: Tensor, entries: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
        """What the rows gather, (N, H, 1, D), their own entry included."""
        if entries is not None:
            self.store(entries)
        table_NP, lengths_N = self.attention.table_NP, self.attention.lengths_N
        if self.attention.gathered is not None:
            seen = self.attention.gathered
            return seen.attend(q_NH1D, self.k_pages, self.v_pages, scale, self.window, self.bias_DH, self.starts_N)
        q_NHD = q_NH1D[:, :, 0].contiguous()
        mixed_NHD = paged_attention(
            q_NHD, self.k_pages, self.v_pages, table_NP, lengths_N, scale, self.window, sequence_N=self.attention.sequence_N,
            bias_DH=self.bias_DH, bits_N=self.attention.bits_N, starts_N=self.starts_N, prefix=self.attention.prefix,
            back_NE=self.attention.back_NE,
        )  # fmt: skip
        return mixed_NHD[:, :, None]

    def attend_source(self, q_NH1D: Tensor, scale: float) -> Tensor:
        assert self.source is not None
        return self.source.attend(q_NH1D, None, scale)


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
