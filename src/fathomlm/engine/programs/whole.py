"""Every token runs every step: plain and recursive models, with continuous sequence batching (the baseline of every figure).

A row is a slot: what is in slot n is row n. Slots that are empty, or that wait for pages, are holes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.engine.programs.base import Choosing, How, Parts, Record
from fathomlm.engine.rows import Reach, reach
from fathomlm.engine.state import ENTER, EngineState, Placed, Reading


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

    def read(self, reading: Reading) -> None:
        read_whole(self.parts, reading)

    def place(self, placed: Sequence[Placed]) -> None:
        """Slots have nothing of their own here."""


def read_whole(parts: Parts, reading: Reading) -> None:
    """Known tokens through every step."""
    read_steps(parts, reading, parts.layers.enter(reading.tokens_N), parts.plan.steps)
    count_entries(parts.state, 0, reading.slots_N)


def read_steps(parts: Parts, reading: Reading, x_NM: Tensor, steps: Sequence[Step]) -> Tensor:
    """Steps that every token runs, with entries in the first table."""
    slots_N, positions_N = reading.slots_N, reading.positions_N
    none_N, all_N = torch.zeros_like(slots_N), torch.ones_like(slots_N, dtype=torch.bool)
    seen = reach(parts.state.tables_STP, slots_N, none_N, positions_N, all_N, parts.page_size)
    return parts.layers.run(x_NM, steps, seen, positions_N)


def count_entries(state: EngineState, table: int, slots_N: Tensor) -> None:
    """One more in a table for each row."""
    state.entries_ST[:, table].index_add_(0, slots_N, torch.ones_like(slots_N))


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
