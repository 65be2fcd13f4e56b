"""Layers over packed weights, in a few kernels made for few rows: the fused way of `PagedLayers`.

Shapes: N rows, M hidden width, D head width, H query heads, I neurons, K and W widths of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages
from fathomlm.engine.layout import Layout
from fathomlm.engine.row_positions import RowPositions, Turns
from fathomlm.engine.sources import Sources
from fathomlm.kernels.attention_blocks import choose_splits, workspace_size
from fathomlm.kernels.few_attention import few_parts, few_space, takes_few_rows
from fathomlm.kernels.norm import add_norm
from fathomlm.kernels.paged_attention import paged_attention
from fathomlm.kernels.row_linear import RowWeight, SplitSpace, add_linear, norm_gated, norm_linear
from fathomlm.kernels.row_qkv import norm_qkv_rope_write
from fathomlm.kernels.triton_here import triton
from fathomlm.kernels.wide_rows import MOST_KERNEL_ROWS
from fathomlm.model.blocks.step_context import CrossRows, PackedRows
from fathomlm.model.decoder import Decoder

if triton is not None:
    from fathomlm.kernels.few_attention import attend_few

Entering = Callable[[Tensor, Step, Tensor | None, AttentionMetadata], Tensor]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room that the kernels of one pass size share, so that recorded work finds it where it was."""

    sums: SplitSpace
    attention: Tensor
    arrived: Tensor
    splits: int
    source_splits: int
    """Programs that share a row's source."""


class FusedLayers:
    def __init__(
        self, decoder: Decoder, packed: Mapping[int, PackedRows], layout: Layout, pages: KVPages, places: RowPositions,
        max_length: int, *, bias_DH: Tensor | None, sources: Sources | None, alone: bool, entering: Entering,
    ) -> None:  # fmt: skip
        """`packed` are weights by step, `bias_DH` is that of relative positions, `entering` makes the stream what a step
        reads; the rest is as in `PagedLayers`."""
        self._architecture, self._plan, self._merged = decoder.architecture, decoder.plan, bool(decoder.deltas)
        self._device, self._dtype = decoder.embed.weight.device, decoder.embed.weight.dtype
        self._packed, self._layout, self._pages, self._places, self._max_length = packed, layout, pages, places, max_length
        self._bias_DH, self._sources, self._alone, self._entering = bias_DH, sources, alone, entering
        self._scratch: dict[int, Scratch] = {}
        self._few_scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def run(
        self, x_NM: Tensor, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor,
        recursion_N: Tensor | None, alone: bool = False,
    ) -> Tensor:  # fmt: skip
        assert recursion_N is None or not self._merged, "rows of several recursions cannot share merged weights"
        if len(x_NM) == 1 and not (alone or self._alone):
            both = AttentionMetadata(
                F.pad(attention.slot_mapping_N, (0, 1), value=-1), attention.table_NP.expand(2, -1),
                F.pad(attention.lengths_N, (0, 1)), planes=attention.planes,
                bits_N=None if attention.bits_N is None else F.pad(attention.bits_N, (0, 1)),
                starts={windows: F.pad(starts_N, (0, 1)) for windows, starts_N in attention.starts.items()},
                source=None if attention.source is None else attention.source.rows(torch.zeros_like(positions_N).expand(2)),
            )  # fmt: skip
            twice = None if recursion_N is None else recursion_N.expand(2)
            return self.run(x_NM.repeat(2, 1), steps, both, positions_N.expand(2), twice)[:1]
        a, plan, scratch = self._architecture, self._plan, self._scratch_for(x_NM.shape[0])
        angles: dict[Turns, tuple[Tensor, Tensor]] = {}
        for step in steps:
            windows, turns = self._places.windows(step, recursion_N), self._places.turns(step, recursion_N)
            if turns not in angles:
                angles[turns] = self._places.angles(turns, positions_N, recursion_N, attention.angles)
            cos_ND, sin_ND = angles[turns]
            x_NM = self._entering(x_NM, step, recursion_N, attention)
            k_pages, v_pages = self._pages.at(*self._layout.home(step), attention.planes)
            packed = self._packed[step.index]
            reads = plan.reads_kv(step)
            qkv_WM = packed.qkv_WM[: a.heads * a.head_dim] if reads else packed.qkv_WM
            groups = 0 if reads else a.kv_heads
            eps, starts_N = a.norm_eps, attention.starts.get(windows)
            entrance = (x_NM, qkv_WM, eps, a.heads, groups, cos_ND, sin_ND, k_pages, v_pages, attention.slot_mapping_N)
            seen = (attention.table_NP, attention.lengths_N, a.scale, windows[0], scratch.splits, scratch.attention)
            q_NHD = norm_qkv_rope_write(*entrance)
            plain = windows == (None,) and starts_N is None and not reads and self._bias_DH is None
            if plain and attention.together is not None and takes_few_rows(q_NHD, attention.together[0]):
                mixed_NHD = self._attend_few(q_NHD, k_pages, v_pages, attention)
            else:
                mixed_NHD = paged_attention(
                    q_NHD, k_pages, v_pages, *seen, sequence_N=attention.sequence_N, arrived=scratch.arrived,
                    bits_N=attention.bits_N, starts_N=starts_N, bias_DH=self._bias_DH,
                )  # fmt: skip
            self._add(x_NM, mixed_NHD.flatten(1), packed.o_MW, packed.after_attn_M, scratch.sums)
            if packed.cross is not None:
                self._add_source(x_NM, step, packed.cross, attention.source, scratch)
            inner_NI = norm_gated(x_NM, packed.both_2IM, eps, activation=packed.activation)
            self._add(x_NM, inner_NI, packed.down_MI, packed.after_mlp_M, scratch.sums)
        return x_NM

    def keep(
        self, x_NM: Tensor, step: Step, attention: AttentionMetadata, positions_N: Tensor, angles: tuple[Tensor, Tensor]
    ) -> None:
        """Keys and values alone; no query."""
        a = self._architecture
        if self._plan.reads_kv(step):
            return
        cos_ND, sin_ND = self._places.angles(self._places.turns(step, None), positions_N, None, angles)
        kv_WM = self._packed[step.index].qkv_WM[a.heads * a.head_dim : (a.heads + 2 * a.kv_heads) * a.head_dim]
        k_pages, v_pages = self._pages.at(*self._layout.home(step), attention.planes)
        slots_N = attention.slot_mapping_N
        norm_qkv_rope_write(x_NM, kv_WM, a.norm_eps, 0, a.kv_heads, cos_ND, sin_ND, k_pages, v_pages, slots_N)

    def _add_source(
        self, x_NM: Tensor, step: Step, cross: CrossRows, source: AttentionMetadata | None, scratch: Scratch
    ) -> None:
        """What rows find in their sources."""
        assert source is not None, "rows of a decoder with an encoder have sources"
        a = self._architecture
        q_NHD = norm_linear(x_NM, cross.q_WM, a.norm_eps).view(len(x_NM), a.heads, a.head_dim)
        mixed_NHD = paged_attention(
            q_NHD, *self._pages.at(0, step.index, source.planes), source.table_NP, source.lengths_N, a.scale, None,
            scratch.source_splits, scratch.attention, arrived=scratch.arrived,
        )  # fmt: skip
        add_linear(x_NM, mixed_NHD.flatten(1), cross.o_MW, out=x_NM, space=scratch.sums)

    def _attend_few(self, q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, attention: AttentionMetadata) -> Tensor:
        """Of rows that stand together."""
        assert attention.together is not None
        (N, H, D), (rows, nodes) = q_NHD.shape, attention.together
        parts = few_parts(N // rows, H, self._max_length)
        if (N, parts) not in self._few_scratch:
            room, counts = few_space(N, H, D, parts)
            self._few_scratch[N, parts] = (
                torch.empty(room, dtype=torch.float32, device=self._device),
                torch.zeros(counts, dtype=torch.int32, device=self._device),
            )
        space = self._few_scratch[N, parts]
        seen = attention.table_NP, attention.lengths_N, self._architecture.scale
        return attend_few(q_NHD, k_pages, v_pages, *seen, rows, nodes, parts, *space, attention.bits_N)

    def _add(self, x_NM: Tensor, inner_NK: Tensor, weight_MK: RowWeight, after_M: Tensor | None, sums: SplitSpace) -> None:
        """A half's last product onto the stream, through the norm behind it where there is one."""
        if after_M is None:
            add_linear(x_NM, inner_NK, weight_MK, out=x_NM, space=sums)
        else:
            add_norm(x_NM, add_linear(None, inner_NK, weight_MK, space=sums), after_M, self._architecture.norm_eps)

    def _scratch_for(self, rows: int) -> Scratch:
        rows = 1 << (rows - 1).bit_length()  # reading asks for any number of rows: a few sizes serve them all
        if rows not in self._scratch:
            a = self._architecture
            source = 0 if self._sources is None else self._sources.table_SP.shape[1] * self._pages.page_size
            splits, source_splits = (
                choose_splits(rows, a.kv_heads, most) if self._device.type == "cuda" else 1
                for most in (self._max_length, source)
            )
            room = workspace_size(rows, a.heads, a.head_dim, max(splits, source_splits))
            few = rows <= MOST_KERNEL_ROWS or self._dtype.itemsize > 2  # a library needs no room of ours
            space = SplitSpace.build(rows if few else 0, a.hidden, self._device)
            workspace = torch.empty(room, dtype=torch.float32, device=self._device)
            arrived = torch.zeros(rows * a.kv_heads, dtype=torch.int32, device=self._device)
            self._scratch[rows] = Scratch(space, workspace, arrived, splits, source_splits)
        return self._scratch[rows]
