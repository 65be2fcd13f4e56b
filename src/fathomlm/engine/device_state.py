"""What the device knows of the sequences in their slots. Passes read and change it; the host adds to it in between.

Shapes: S slots and one more, the spare one, for rows that stand for nothing; T tables, P pages of a table, M hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.engine.layout import Layout
from fathomlm.engine.schedule import Placement, PrefillChunk, SchedulerOutput
from fathomlm.engine.sources import Sources
from fathomlm.kernels.routed_rows import ENTER as ENTER  # stages that every program knows
from fathomlm.kernels.routed_rows import IDLE as IDLE

COLUMNS = ("token", "position", "stage", "since", "generated", "limit", "epoch", "max_depth", "ignores_end", "held")
"""`held`: behind each token the slot is idle until the host says what may come next (`EngineState.start`)."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Known tokens of several sequences, each a row of its own; a sequence's rows stand together, in order."""

    slots_N: Tensor
    tokens_N: Tensor
    positions_N: Tensor
    starts_N: Tensor
    """The row at which a row's sequence begins."""
    depths_N: Tensor | None = None
    """After how many layers a token left that was generated before; None where all ran to the end."""
    asks: bool = field(default=True, kw_only=True)
    """Whether the device may be asked how many rows go on: not where the pass may be captured."""

    def rows(self, at_K: Tensor) -> PrefillBatch:
        """Some of them, whose sequences begin where they began."""
        depths_K = None if self.depths_N is None else self.depths_N[at_K]
        columns = self.slots_N[at_K], self.tokens_N[at_K], self.positions_N[at_K], self.starts_N[at_K]
        return PrefillBatch(*columns, depths_K, asks=self.asks)


class EngineState:
    def __init__(
        self, layout: Layout, slots: int, pages: int, hidden: int, max_depth: int, device: torch.device, dtype: torch.dtype,
        source_pages: int = 0,
    ) -> None:  # fmt: skip
        """`pages` is how many a table of one sequence may have, `source_pages` a source, `max_depth` how deep a token may go
        that has no limit."""
        self.slots, self.spare, self.max_depth = slots, slots, max_depth
        tables = len(layout.tables)
        self.device = device
        self.numbers_SC = torch.zeros(slots + 1, len(COLUMNS), dtype=torch.int64, device=device)
        columns = dict(zip(COLUMNS, self.numbers_SC.unbind(1), strict=True))
        self.token_S, self.position_S, self.stage_S = (columns[name] for name in ("token", "position", "stage"))
        self.since_S, self.generated_S, self.limit_S = (columns[name] for name in ("since", "generated", "limit"))
        self.epoch_S, self.max_depth_S, self.ignores_S = (columns[name] for name in ("epoch", "max_depth", "ignores_end"))
        self.held_S = columns["held"]
        self.stage_S.fill_(IDLE)
        self.entries_ST = torch.zeros(slots + 1, tables, dtype=torch.int64, device=device)
        self.capacity_ST = torch.zeros(slots + 1, tables, dtype=torch.int64, device=device)
        self.tables_STP = torch.zeros(slots + 1, tables, pages, dtype=torch.int32, device=device)
        self.x_SM = torch.zeros(slots + 1, hidden, dtype=dtype, device=device)
        self.sources = Sources.build(slots, source_pages, device) if source_pages else None
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrivals = 0
        self.placed_K = torch.zeros(0, dtype=torch.int64, device=device)
        """The slots that were placed last, for what programs keep of theirs."""

    def stop(self, slots: Sequence[int]) -> None:
        """Silence slots."""
        if slots:
            self._fill(self.stage_S, slots, IDLE)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """What was placed and granted: two uploads, then a few small writes."""
        if scheduled.placements:
            self._place(scheduled.placements)
        grants, capacity = scheduled.grants, scheduled.capacity
        if not (grants or capacity):
            return
        (slot, table, _), stride = self.tables_STP.stride(), self.capacity_ST.stride(0)
        slots, tables, firsts, pages = zip(*grants, strict=True) if grants else ((), (), (), ())
        first_G = np.array(slots, np.int64) * slot + np.array(tables, np.int64) * table + np.array(firsts, np.int64)
        counts_G = np.fromiter(map(len, pages), np.int64, len(pages))
        granted = int(counts_G.sum())
        at_N = np.arange(granted) + np.repeat(first_G - np.cumsum(counts_G) + counts_G, counts_G)
        rooms_K = np.array(list(capacity), np.int64).reshape(-1, 2) @ np.array((stride, 1))
        values_N = np.fromiter(itertools.chain(*pages, capacity.values()), np.int64, granted + len(rooms_K))
        at, values = self.upload(np.stack((np.concatenate((at_N, rooms_K)), values_N)))
        if granted:
            self.tables_STP.view(-1).index_copy_(0, at[:granted], values[:granted].to(self.tables_STP.dtype))
        if capacity:
            self.capacity_ST.view(-1).index_copy_(0, at[granted:], values[granted:])

    def prefill_columns(
        self,
        chunks: Sequence[PrefillChunk],
        tokens: Sequence[Sequence[int]],
        depths: Sequence[Sequence[int]] | None = None,
        size: int | None = None,
    ) -> Tensor:
        """Chunks, their tokens and perhaps the depths of these as the columns of a PrefillBatch, in one upload; up to `size`
        with rows of the spare slot, each a chunk of its own. By numpy: of a thousand tokens torch would take a millisecond
        to make a tensor of a list of rows, while a GPU waits."""
        counts = [len(each) for each in tokens]
        total = sum(counts)
        ends = np.cumsum(counts)
        slots, firsts, starts = (
            np.repeat(column, counts)
            for column in ([chunk.slot for chunk in chunks], [chunk.first for chunk in chunks], ends - counts)
        )
        given = (tokens,) if depths is None else (tokens, depths)
        flat = [np.fromiter(itertools.chain.from_iterable(each), np.int64, total) for each in given]
        columns = np.stack((slots, flat[0], firsts + np.arange(total) - starts, starts, *flat[1:]))
        if size is not None and size > total:
            rest = np.arange(total, size)
            nothing = np.zeros_like(rest)
            added = (np.full_like(rest, self.spare), nothing, nothing, rest, *(nothing for _ in flat[1:]))
            columns = np.concatenate((columns, np.stack(added)), 1)
        return self.upload(columns)

    def start(self, slots: Sequence[int]) -> None:
        """Sequences that are prefilled begin to run, those that were held go on."""
        if slots:
            self._fill(self.stage_S, slots, ENTER)

    def _place(self, placements: Sequence[Placement]) -> None:
        """All numbers of new sequences in one upload: each takes the host longer than what is then done with it."""
        rows: list[tuple[int, ...]] = []
        for placement in placements:
            sequence, request = placement.sequence, placement.sequence.request
            stage, since = ENTER if placement.ready else IDLE, -(10**12) + self._arrivals
            generated, limit = len(sequence.tokens), sequence.max_new_tokens
            last = sequence.tokens[-1] if generated else sequence.prompt[-1]  # the first token to run
            fields = (last, sequence.length - 1, stage, since, generated, limit, placement.epoch)
            ignores, held = request.sampling.ignore_eos, request.constraint is not None
            asked = (request.max_depth or self.max_depth, int(ignores), int(held))
            rows.append((placement.slot, *fields, *asked, *placement.entries))
            self._arrivals += 1
        if self.sources is not None:
            rows = [(*row, *more) for row, more in zip(rows, self.sources.rows(placements), strict=True)]
        given_CK = self.upload(np.ascontiguousarray(np.array(rows).T))
        slots_K, ends = given_CK[0], np.cumsum([1, len(COLUMNS), self.entries_ST.shape[1]]).tolist()
        self.placed_K = slots_K
        self.numbers_SC.index_copy_(0, slots_K, given_CK[ends[0] : ends[1]].T)
        self.entries_ST.index_copy_(0, slots_K, given_CK[ends[1] : ends[2]].T)
        self.capacity_ST.index_fill_(0, slots_K, 0)
        if self.sources is not None:
            self.sources.place(slots_K, given_CK[ends[2] :].T)

    def _fill(self, column_S: Tensor, slots: Sequence[int], value: int) -> None:
        column_S.index_fill_(0, self.upload(slots), value)

    def upload(self, values: Sequence[object] | npt.NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        """From pinned memory: a copy from elsewhere would wait until the device has done all it was given."""
        here = torch.as_tensor(values, dtype=dtype)
        return (here.pin_memory() if self.device.type == "cuda" else here).to(self.device, non_blocking=True)
