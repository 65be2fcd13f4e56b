"""The routed cache: each recursion stores entries only for the tokens that ran it (thesis 4.3.3).

Prelude and coda steps see every token and keep dense buffers. A core step has one short run of entries for each row; a
ledger for each recursion says which slot of the row every entry belongs to. Rows fill at different speeds, so runs are
kept flush left in one buffer, and what lies behind a row's count is spare room that nobody reads.

Shapes: B batch, G key-value heads, N tokens of this pass that run a recursion (padded to the longest row), R entries so
far (likewise), D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.cache.dense import DenseCache, Entries, StepKV, StoredEntries
from fathomlm.depth import DepthPlan, Step

NOWHERE = 2**31
"""The slot of an entry that is not there: later than every query."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where this pass' entries of one recursion go: for each of them its row, its place among the N, its place behind what
    the row has, and the slot it belongs to."""

    row: Tensor
    column: Tensor
    behind: Tensor
    slot: Tensor
    longest: int


class _Ledger:
    """Which slots one recursion has entries for, in each row."""

    def __init__(self) -> None:
        self.slots_BR: Tensor | None = None
        self.counts_B: Tensor | None = None

    def place(self, slots_BN: Tensor, valid_BN: Tensor) -> _Placement:
        B = slots_BN.shape[0]
        if self.slots_BR is None or self.counts_B is None:
            self.slots_BR = slots_BN.new_full((B, 0), NOWHERE)
            self.counts_B = torch.zeros(B, dtype=torch.long, device=slots_BN.device)
        row, column = valid_BN.nonzero(as_tuple=True)
        behind = self.counts_B[row] + (valid_BN.cumsum(1) - 1)[row, column]
        self.counts_B = self.counts_B + valid_BN.sum(1)
        longest = int(self.counts_B.max())
        if longest > self.slots_BR.shape[1]:
            more = self.slots_BR.new_full((B, max(longest, 2 * self.slots_BR.shape[1]) - self.slots_BR.shape[1]), NOWHERE)
            self.slots_BR = torch.cat((self.slots_BR, more), dim=1)
        slot = slots_BN[row, column]
        self.slots_BR[row, behind] = slot
        return _Placement(row, column, behind, slot, longest)

    def truncate(self, length: int) -> None:
        if self.slots_BR is not None:
            self.slots_BR = self.slots_BR.masked_fill(self.slots_BR >= length, NOWHERE)
            self.counts_B = (self.slots_BR < NOWHERE).sum(1)


class _Runs(StoredEntries):
    """One core step's entries."""

    def __init__(self) -> None:
        super().__init__()
        self.placement: _Placement | None = None

    def append(self, k_BGND: Tensor, v_BGND: Tensor) -> Entries:
        place = self.placement
        assert place is not None
        k, v = self.grow(k_BGND, len(k_BGND), place.longest)
        k[place.row, :, place.behind] = k_BGND[place.row, :, place.column]
        v[place.row, :, place.behind] = v_BGND[place.row, :, place.column]
        return self.entries()

    def entries(self) -> Entries:
        assert self.placement is not None
        return self.first(self.placement.longest)


class _RunsOver:
    """hybrid: a step's own runs written over the first recursion's, which have an entry for every token."""

    stores = True

    def __init__(self, own: _Runs, base: _Runs, own_ledger: _Ledger, base_ledger: _Ledger) -> None:
        self._own, self._base = own, base
        self._own_ledger, self._base_ledger = own_ledger, base_ledger

    def append(self, k_BGND: Tensor, v_BGND: Tensor) -> Entries:
        k, v = self._own.append(k_BGND, v_BGND)
        slots, counts, base_slots = self._own_ledger.slots_BR, self._own_ledger.counts_B, self._base_ledger.slots_BR
        assert slots is not None
        assert counts is not None
        assert base_slots is not None
        own = torch.arange(k.shape[2], device=k.device) < counts[:, None]
        row, at = own.nonzero(as_tuple=True)
        base_k, base_v = self._base.entries()
        where = torch.searchsorted(base_slots[:, : base_k.shape[2]].contiguous(), slots[:, : k.shape[2]].contiguous())
        whole = []
        for mine, theirs in ((k, base_k), (v, base_v)):
            mixed = theirs.clone()
            mixed[row, :, where[row, at]] = mine[row, :, at]
            whole.append(mixed)
        return whole[0], whole[1]

    def prefix(self, make: Callable[[], Entries]) -> Entries:
        return self._own.prefix(make)


class RoutedCache(DenseCache):
    """Entries of a routed model: dense before and after the core, by recursion inside it."""

    def __init__(self, plan: DepthPlan, reserve: int = 64) -> None:
        super().__init__(plan, reserve)
        self._runs = {step.index: _Runs() for step in plan if step.part == "core" and not plan.reads_kv(step)}
        self._ledgers = [_Ledger() for _ in range(plan.recursions)]

    def place(self, recursion: int, slots_BN: Tensor, valid_BN: Tensor) -> None:
        """Say which tokens run a recursion in this pass: their slots, in order, where `valid_BN`."""
        placement = self._ledgers[recursion].place(slots_BN, valid_BN)
        for step in self._plan.recursion_steps(recursion):
            if step.index in self._runs:
                self._runs[step.index].placement = placement

    def key_slots(self, recursion: int) -> Tensor:
        """The slot of every entry that a recursion's queries attend to, (B, R); those that are not there lie past the
        end."""
        ledger = self._ledgers[0 if self._plan.kv != "cache" else recursion]
        assert ledger.slots_BR is not None
        assert ledger.counts_B is not None
        return ledger.slots_BR[:, : int(ledger.counts_B.max())]

    def at(self, step: Step) -> StepKV | None:
        if step.part != "core":
            return super().at(step)
        if self._plan.reads_kv(step):
            return None
        own, source = self._runs[step.index], self._plan.kv_sources[step.index]
        if source == step.index:
            return own
        return _RunsOver(own, self._runs[source], self._ledgers[step.recursion], self._ledgers[0])

    def reads(self, step: Step) -> Entries | None:
        return self._runs[self._plan.kv_sources[step.index]].entries() if self._plan.reads_kv(step) else None

    def entries(self, recursion: int) -> list[int]:
        """How many tokens of each row a recursion has entries for."""
        counts = self._ledgers[recursion].counts_B
        return [] if counts is None else counts.tolist()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for ledger in self._ledgers:
            ledger.truncate(length)

    def bytes(self) -> int:
        total = super().bytes()
        for step in self._plan:
            runs = self._runs.get(step.index)
            if runs is not None and runs.k is not None:
                _, G, _, D = runs.k.shape
                total += 2 * G * D * runs.k.element_size() * sum(self.entries(step.recursion))
        return total
