"""Every token runs every step: plain and recursive models, with continuous sequence batching (the baseline of every figure).

A row is a slot: what is in slot n is row n. Slots that are empty, or that wait for pages, are holes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.engine.programs.base import Choosing, How, Parts, Record
from fathomlm.engine.rows import Reach, reach
from fathomlm.engine.state import ENTER, Placed


class WholeProgram:
    def __init__(self, parts: Parts) -> None:
        assert parts.rows == parts.state.slots, "a row is a slot"
        self.parts = parts
        device = parts.state.device
        self.record = Record.empty(parts.rows, parts.sampler.max_logprobs, device)
        self._rows_N = torch.arange(parts.rows, device=device)
        self._depth_N = torch.full((parts.rows,), parts.plan.recursions, device=device)
        self._sure_N = torch.zeros(parts.rows, device=device)
        self._begin = parts.small(begin)
        self._choose = Choosing(parts)

    def tick(self, how: How) -> None:
        parts, s = self.parts, self.parts.state
        tokens_N, positions_N, live_N, *found = self._begin(
            s.numbers_SC, s.entries_ST, s.room_ST, s.tables_STP, self._rows_N, parts.page_size
        )
        x_NM = parts.layers.run(parts.layers.enter(tokens_N), parts.plan.steps, Reach(*found), positions_N)
        scores_NV = parts.layers.scores(x_NM)
        self._choose(scores_NV, self._rows_N, live_N, self._depth_N, self._sure_N, how, self.record)

    def read(self, slot: int, tokens_N: Tensor, first: int) -> None:
        read_whole(self.parts, slot, tokens_N, first)

    def place(self, placed: Sequence[Placed]) -> None:
        """Slots have nothing of their own here."""


def read_whole(parts: Parts, slot: int, tokens_N: Tensor, first: int) -> None:
    """Known tokens through every step, each a row of its own."""
    s = parts.state
    many = tokens_N.shape[0]
    positions_N = torch.arange(first, first + many, device=s.device)
    rows_N, none_N = torch.full_like(positions_N, slot), torch.zeros_like(positions_N)
    seen = reach(s.tables_STP, rows_N, none_N, positions_N, torch.ones_like(rows_N, dtype=torch.bool), parts.page_size)
    parts.layers.run(parts.layers.enter(tokens_N), parts.plan.steps, seen, positions_N)
    s.entries_ST[slot] += many


def begin(
    numbers_SC: Tensor, entries_ST: Tensor, room_ST: Tensor, tables_STP: Tensor, rows_N: Tensor, page_size: int
) -> tuple[Tensor, ...]:
    """Who runs, where, and what they see; their entry counts as made."""
    token, position, stage = numbers_SC.index_select(0, rows_N)[:, :3].unbind(1)
    ranks_N = entries_ST[rows_N, 0]
    live_N = (stage == ENTER) & (ranks_N < room_ST[rows_N, 0])
    seen = reach(tables_STP, rows_N, torch.zeros_like(rows_N), ranks_N, live_N, page_size)
    entries_ST[: rows_N.shape[0], 0] += live_N.long()
    return token, torch.where(live_N, position, 0), live_N, seen.slots_N, seen.table_NP, seen.lengths_N
