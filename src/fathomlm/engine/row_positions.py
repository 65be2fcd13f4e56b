"""Where rows of a batch stand, layer by layer: their angles, and the first entry that they see.

A window counts positions (`model.attention_mask`). Where every token has an entry, a window is a number of entries. In
recursion-wise tables only the tokens that ran a recursion have one: there positions are kept beside the pages, and the first
entry inside a row's window is looked for, once in a pass for all layers with that window. Drafts of a tree have several
entries for one position, all of them behind the window's first.

Rows of one pass may be at different recursions of a layer, which may take the places of layers with different windows,
rotary bases or none: each row then has its own recursion's.

Shapes: N rows, P positions, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.depth.architecture import Rope
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages, Windows
from fathomlm.engine.layout import Layout
from fathomlm.kernels.entry_positions import NO_WINDOW, window_starts, write_positions
from fathomlm.kernels.rope import rope_table
from fathomlm.model.decoder import Decoder

Turn = Literal["all", "local", "none"]
"""How a layer turns queries and keys: by the model's angles, by those of layers with a window, or not."""
Turns = tuple[Turn, ...]


class RowPositions:
    def __init__(self, decoder: Decoder, layout: Layout, pages: KVPages, max_length: int) -> None:
        self._plan, self._layout, self._pages, self._max_length = decoder.plan, layout, pages, max_length
        self._architecture = architecture = decoder.architecture
        weight = decoder.embed.weight
        self._device, dtype = weight.device, weight.dtype
        positions_1P = torch.arange(max_length, device=self._device)[None]
        ropes: dict[Turn, Rope | None] = {"all": architecture.rope, "local": architecture.local_rope}
        self._tables = {
            turn: tuple(table[0, 0] for table in rope_table(rope, architecture.rotary_dim, positions_1P, dtype))
            for turn, rope in ropes.items()
            if rope is not None
        }
        if not architecture.rotary_dim:  # kernels turn whole heads: by nothing
            ones_PD = torch.ones(max_length, architecture.head_dim, device=self._device, dtype=dtype)
            self._tables = {"all": (ones_PD, torch.zeros_like(ones_PD))}
        self._windows: dict[tuple[int, bool], Windows] = {}
        self._turns: dict[tuple[int, bool], Turns] = {}
        self._numbers: dict[Windows, Tensor] = {}

    def tables(self) -> tuple[Tensor, ...]:
        """Cosines and sines of every position, (P, D) each."""
        return self._tables["all"]

    def windows(self, step: Step, recursion_N: Tensor | None) -> Windows:
        """How many positions rows at a step see, by recursion where these differ: rows with `recursion_N` may be at any use
        of its layer. None sees everything that a sequence may have."""
        key = (step.index, recursion_N is not None)
        if key not in self._windows:
            found = tuple(self._architecture.window(use.origin) for use in self.uses(step, recursion_N))
            wide = tuple(None if window is None or window >= self._max_length else window for window in found)
            self._windows[key] = wide if len(set(wide)) > 1 else wide[:1]
        return self._windows[key]

    def turns(self, step: Step, recursion_N: Tensor | None) -> Turns:
        """How rows at a step turn queries and keys, by recursion where these differ."""
        key = (step.index, recursion_N is not None)
        if key not in self._turns:
            found = tuple(self._turn(use) for use in self.uses(step, recursion_N))
            self._turns[key] = found if len(set(found)) > 1 else found[:1]
        return self._turns[key]

    def uses(self, step: Step, recursion_N: Tensor | None) -> tuple[Step, ...]:
        """The steps at which rows of a step may be: with `recursion_N` any use of its layer, by recursion."""
        mixed = recursion_N is not None and self._plan.is_shared(step)
        return self._plan.uses(step.layer)[step.recursion :] if mixed else (step,)

    def _turn(self, step: Step) -> Turn:
        a = self._architecture
        if not a.rotates(step.origin):
            return "none"
        return "local" if a.window(step.origin) is not None and a.local_rope is not None else "all"

    def angles(
        self, turns: Turns, positions_N: Tensor, recursion_N: Tensor | None, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rows, (N, D) each; `known` are the model's own."""
        each = [self._angles(turn, positions_N, known) for turn in turns]
        cos_ND, sin_ND = each[0]
        for recursion, (cos, sin) in enumerate(each[1:], 1):
            assert recursion_N is not None
            own_N1 = recursion_N[:, None] == recursion
            cos_ND, sin_ND = torch.where(own_N1, cos, cos_ND), torch.where(own_N1, sin, sin_ND)
        return cos_ND, sin_ND

    def _angles(self, turn: Turn, positions_N: Tensor, known: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if known is not None and (turn == "all" or not self._architecture.rotary_dim):
            return known
        cos_PD, sin_PD = self._tables["all" if turn == "none" else turn]
        if turn == "none":
            shape = (len(positions_N), cos_PD.shape[1])
            return cos_PD.new_ones(shape), sin_PD.new_zeros(shape)
        return cos_PD.index_select(0, positions_N), sin_PD.index_select(0, positions_N)

    def place(
        self, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor, recursion_N: Tensor | None
    ) -> AttentionMetadata:
        """Leave positions beside the entries that rows are about to make, where these are kept; and say from which entry on
        rows see, wherever a window does not say it (`AttentionMetadata.starts`)."""
        if not steps or not (self._architecture.windows or self._layout.positioned):
            return attention
        pool = self._layout.home(steps[0])[0]
        kept = self.kept(steps[0], recursion_N)
        if kept and self._architecture.positions == "relative":
            write_positions(self._pages.positions[pool], attention.slot_mapping_N, positions_N)
        starts: dict[Windows, Tensor] = {}
        for step in steps:
            windows = self.windows(step, recursion_N)
            if windows in starts or windows == (None,):
                continue
            if kept:
                assert recursion_N is not None
                pages = self._pages.positions[pool]
                if not starts:
                    write_positions(pages, attention.slot_mapping_N, positions_N)
                seen = (attention.table_NP, attention.lengths_N, positions_N)
                starts[windows] = window_starts(pages, *seen, self._by_recursion(windows), recursion_N)
            elif len(windows) > 1 or attention.bits_N is not None:
                by_R = self._by_recursion(windows)
                starts[windows] = (
                    (positions_N + 1 - (by_R[0] if recursion_N is None else by_R[recursion_N])).clamp_min(0).int()
                )
        return replace(attention, starts=starts) if starts else attention

    def kept(self, step: Step, recursion_N: Tensor | None) -> bool:
        """Whether the positions of a step's entries are kept beside them."""
        return recursion_N is not None and self._layout.home(step)[0] in self._layout.positioned

    def back(self, step: Step, attention: AttentionMetadata, positions_N: Tensor) -> Tensor:
        """How many positions in front of each row its entries are, (N, entries of its table), where they are kept."""
        pages, table_NP = self._pages.positions[self._layout.home(step)[0]], attention.table_NP
        first_P = torch.arange(table_NP.shape[1], device=table_NP.device) * pages.shape[1]
        table_NP = torch.where(first_P < attention.lengths_N[:, None], table_NP, 0)  # behind a row's last page: anything
        return positions_N[:, None] - pages[table_NP.long()].flatten(1)

    def _by_recursion(self, windows: Windows) -> Tensor:
        if windows not in self._numbers:
            each = windows if len(windows) > 1 else windows * self._plan.recursions
            numbers = [NO_WINDOW if window is None else window for window in each]
            self._numbers[windows] = torch.tensor(numbers, dtype=torch.int32, device=self._device)
        return self._numbers[windows]
