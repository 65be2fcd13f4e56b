"""The slot cache: entries at given slots of given rows, so that a pass may run some rows only, each with its own tokens.

Rows begin at slot 0 and a token's slot is its position: nothing is padded on the left. Every step counts what it holds of
each row; deep steps may hold fewer slots than shallow ones, while tokens that left early wait for them. What lies behind
a row's count is spare room, and no query looks there: it sees slots up to its own.

Shapes: B rows of the cache, R batch size, G key-value heads, N tokens of a row (padded to the longest row), S slots,
D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.cache.dense import Entries, StepKV, StoredEntries
from fathomlm.depth import DepthPlan, Step


@dataclass(frozen=True, slots=True)
class Span:
    """Some tokens of a row, one behind the other."""

    row: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class Focus:
    """The tokens of a forward pass: spans of different rows, side by side."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        assert all(span.count > 0 for span in spans)
        self.spans = tuple(spans)
        self.reach = max(span.end for span in spans)
        """How many slots the tokens attend to."""
        longest = max(span.count for span in spans)
        # What stands behind a short span is its last token again; it is stored nowhere and nobody reads its output.
        slots = [[min(span.first + n, span.end - 1) for n in range(longest)] for span in spans]
        self.slots_RN = torch.tensor(slots, device=device)
        self.rows_R = torch.tensor([span.row for span in spans], device=device)
        counts_R1 = torch.tensor([[span.count] for span in spans], device=device)
        valid_RN = torch.arange(longest, device=device) < counts_R1
        self.row, self.column = valid_RN.nonzero(as_tuple=True)
        self.slot = self.slots_RN[self.row, self.column]


class _Slots(StoredEntries):
    """One step's entries."""

    def __init__(self, rows: int, reserve: int) -> None:
        super().__init__()
        self.counts = [0] * rows
        self.focus: Focus | None = None
        self._reserve = reserve

    def append(self, k_RGND: Tensor, v_RGND: Tensor) -> Entries:
        """Store the tokens of the batch at their slots; returns all that their rows hold, up to the furthest slot."""
        at = self.focus
        assert at is not None
        for span in at.spans:
            assert span.first == self.counts[span.row], "entries go behind those that the row has"
        k, v = self.grow(k_RGND, len(self.counts), at.reach, self._reserve)
        rows = at.rows_R[at.row]
        k[rows, :, at.slot] = k_RGND[at.row, :, at.column]
        v[rows, :, at.slot] = v_RGND[at.row, :, at.column]
        for span in at.spans:
            self.counts[span.row] = span.end
        return self.entries(at)

    def entries(self, at: Focus) -> Entries:
        k, v = self.first(at.reach)
        if [span.row for span in at.spans] == list(range(len(self.counts))):
            return k, v
        return k.index_select(0, at.rows_R), v.index_select(0, at.rows_R)


class SlotCache:
    """Entries of a batch by row and slot; a pass says in `focus` which tokens it runs."""

    def __init__(self, plan: DepthPlan, rows: int, *, steps: Iterable[Step] | None = None, reserve: int = 64) -> None:
        """`steps` are those that will run, by default all; `reserve` is how many slots to set aside at first."""
        self._plan = plan
        self._rows = rows
        steps = plan if steps is None else steps
        self._steps = {step.index: _Slots(rows, reserve) for step in steps if not plan.reads_kv(step)}
        self._focus: Focus | None = None

    def focus(self, focus: Focus) -> None:
        """Which tokens run the steps to come."""
        self._focus = focus
        for slots in self._steps.values():
            slots.focus = focus

    @property
    def length(self) -> int:
        """How many slots every step holds of every row."""
        return min(min(slots.counts) for slots in self._steps.values())

    def advance(self, tokens: int) -> None:
        """Nothing to note: entries are counted where they are stored."""

    def at(self, step: Step) -> StepKV | None:
        return self._steps.get(step.index)

    def reads(self, step: Step) -> Entries | None:
        if not self._plan.reads_kv(step):
            return None
        assert self._focus is not None
        return self._steps[self._plan.kv_sources[step.index]].entries(self._focus)

    def repeat(self, source: Step, steps: Iterable[Step]) -> None:
        """Store at some steps the entries that another holds of the tokens in focus."""
        at = self._focus
        assert at is not None
        k_RGSD, v_RGSD = self._steps[source.index].entries(at)
        where = at.slots_RN[:, None, :, None].expand(-1, k_RGSD.shape[1], -1, k_RGSD.shape[3])
        for step in steps:
            self._steps[step.index].append(k_RGSD.gather(2, where), v_RGSD.gather(2, where))

    def held(self, step: Step, row: int) -> int:
        """How many slots a step holds of a row."""
        return self._steps[step.index].counts[row]

    def entries(self, step: Step, row: int) -> Entries:
        """Keys and values that a step holds of a row, (G, S, D) each."""
        k, v = self._steps[step.index].first(self.held(step, row))
        return k[row], v[row]

    def truncate(self, length: int, row: int | None = None, steps: Iterable[Step] | None = None) -> None:
        """Forget everything after the first `length` slots, of one row or of all, in some steps or in all."""
        indices = self._steps if steps is None else [step.index for step in steps if step.index in self._steps]
        for slots in (self._steps[index] for index in indices):
            for r in range(self._rows) if row is None else (row,):
                slots.counts[r] = min(slots.counts[r], length)

    def bytes(self) -> int:
        """What the stored entries take, spare room left out."""
        total = 0
        for slots in self._steps.values():
            if slots.k is not None:
                total += 2 * slots.k[0, :, 0].numel() * slots.k.element_size() * sum(slots.counts)
        return total
