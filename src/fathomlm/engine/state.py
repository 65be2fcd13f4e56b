"""What the device knows of the sequences in their slots. Passes read and change it; the host only adds to it between ticks.

Shapes: S slots and one more, the spare one, for rows that stand for nothing; T tables, P pages of a table, M hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.engine.layout import Layout
from fathomlm.engine.orders import Chunk, Plan
from fathomlm.kernels.routed_rows import ENTER as ENTER  # stages that every program knows
from fathomlm.kernels.routed_rows import IDLE as IDLE

COLUMNS = ("token", "position", "stage", "since", "made", "limit", "epoch", "deepest", "ignores_end")


@dataclass(frozen=True, slots=True)
class Placed:
    """What a slot begins with."""

    slot: int
    token: int
    """The last known token: the first to run."""
    position: int
    made: int
    """How many tokens the text has so far."""
    limit: int
    """How many it may have."""
    epoch: int
    deepest: int
    ignores_end: bool
    entries: tuple[int, ...]
    ready: bool
    threshold: float = 1.0
    """exits: how sure an exit must be."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Known tokens of several sequences, each a row of its own; a sequence's rows stand together, in its text's order."""

    slots_N: Tensor
    tokens_N: Tensor
    positions_N: Tensor
    starts_N: Tensor
    """The row at which a row's sequence begins."""


class EngineState:
    def __init__(
        self, layout: Layout, slots: int, pages: int, hidden: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`pages` is how many a table of one sequence may have."""
        self.slots, self.spare = slots, slots
        tables = len(layout.tables)
        self.device = device
        self.numbers_SC = torch.zeros(slots + 1, len(COLUMNS), dtype=torch.int64, device=device)
        columns = dict(zip(COLUMNS, self.numbers_SC.unbind(1), strict=True))
        self.token_S, self.position_S, self.stage_S = (columns[name] for name in ("token", "position", "stage"))
        self.since_S, self.made_S, self.limit_S = (columns[name] for name in ("since", "made", "limit"))
        self.epoch_S, self.deepest_S, self.ignores_S = (columns[name] for name in ("epoch", "deepest", "ignores_end"))
        self.stage_S.fill_(IDLE)
        self.entries_ST = torch.zeros(slots + 1, tables, dtype=torch.int64, device=device)
        self.room_ST = torch.zeros(slots + 1, tables, dtype=torch.int64, device=device)
        self.tables_STP = torch.zeros(slots + 1, tables, pages, dtype=torch.int32, device=device)
        self.x_SM = torch.zeros(slots + 1, hidden, dtype=dtype, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrivals = 0

    def stop(self, slots: Sequence[int]) -> None:
        """Silence slots."""
        if slots:
            self._fill(self.stage_S, slots, IDLE)

    def hand_out(self, plan: Plan, placed: Sequence[Placed]) -> None:
        """What a plan places and grants: a few uploads, then as many small writes."""
        if placed:
            self._place(placed)
        if plan.grants:
            slot, table, _ = self.tables_STP.stride()
            at = [grant.slot * slot + grant.table * table + grant.index for grant in plan.grants]
            self._write(self.tables_STP, at, [grant.page for grant in plan.grants])
        if plan.rooms:
            slot, _ = self.room_ST.stride()
            at = [room.slot * slot + room.table for room in plan.rooms]
            self._write(self.room_ST, at, [room.entries for room in plan.rooms])

    def reading(self, chunks: Sequence[Chunk], texts: Sequence[Sequence[int]]) -> Reading:
        """Chunks and their tokens as rows, in one upload. By numpy: of a thousand tokens torch would take a millisecond to
        make a tensor of a list of rows, while a GPU waits."""
        counts = [len(tokens) for tokens in texts]
        total = sum(counts)
        ends = np.cumsum(counts)
        slots, firsts, starts = (
            np.repeat(column, counts)
            for column in ([chunk.slot for chunk in chunks], [chunk.first for chunk in chunks], ends - counts)
        )
        tokens = np.fromiter(itertools.chain.from_iterable(texts), np.int64, total)
        return Reading(*self.upload(np.stack((slots, tokens, firsts + np.arange(total) - starts, starts))))

    def start(self, slots: Sequence[int]) -> None:
        """Sequences whose text is read begin to run."""
        if slots:
            self._fill(self.stage_S, slots, ENTER)

    def _place(self, placed: Sequence[Placed]) -> None:
        rows = []
        for one in placed:
            stage = ENTER if one.ready else IDLE
            fields = (one.token, one.position, stage, -(10**12) + self._arrivals, one.made, one.limit, one.epoch)
            rows.append((*fields, one.deepest, int(one.ignores_end)))
            self._arrivals += 1
        slots_K = self.upload([one.slot for one in placed])
        self.numbers_SC.index_copy_(0, slots_K, self.upload(rows))
        self.entries_ST.index_copy_(0, slots_K, self.upload([one.entries for one in placed]))
        self.room_ST.index_fill_(0, slots_K, 0)

    def _fill(self, column_S: Tensor, slots: Sequence[int], value: int) -> None:
        column_S.index_fill_(0, self.upload(slots), value)

    def _write(self, target: Tensor, at: list[int], values: list[int]) -> None:
        both = self.upload([at, values])
        target.view(-1).index_copy_(0, both[0], both[1].to(target.dtype))

    def upload(self, values: Sequence[object] | npt.NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        """From pinned memory: a copy from elsewhere would wait until the device has done all it was given."""
        here = torch.as_tensor(values, dtype=dtype)
        return (here.pin_memory() if self.device.type == "cuda" else here).to(self.device, non_blocking=True)
