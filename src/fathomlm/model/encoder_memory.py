"""The encoder's output, as a decoder's cross-attention sees it.

Its keys and values depend on the step and the source only. Within a pass they are made where they are used; behind a
cache they are made once for a sequence and kept here, beside the encoder's output that they belong to.

Shapes: B batch, S tokens of the source, M the encoder's width, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathomlm.cache import Entries
from fathomlm.depth import Step


class StepMemory:
    """What one step's cross-attention sees. Plain attributes and no step number: a compiled layer takes one for each
    step without being compiled anew."""

    def __init__(self, states_BSM: Tensor, mask: Tensor | None, keeps: bool) -> None:
        self.states_BSM = states_BSM
        self.mask = mask
        """(B, 1, 1, S), False at padding; None where there is none."""
        self.keeps = keeps
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def entries(self, make: Callable[[Tensor], Entries]) -> Entries:
        """Keys and values (B, G, S, D), made from the encoder's output unless they were kept."""
        if self.k is not None and self.v is not None:
            return self.k, self.v
        k, v = make(self.states_BSM)
        if self.keeps:
            self.k, self.v = k, v
        return k, v


class _SomeRows(StepMemory):
    """Rows of another's entries. Those are made for all rows at once, however few a pass runs."""

    def __init__(self, whole: StepMemory, mask: Tensor | None, rows_R: Tensor) -> None:
        super().__init__(whole.states_BSM, mask, keeps=True)
        self._whole = whole
        self._rows_R = rows_R

    def entries(self, make: Callable[[Tensor], Entries]) -> Entries:
        k, v = self._whole.entries(make)
        return k.index_select(0, self._rows_R), v.index_select(0, self._rows_R)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderMemory:
    """The encoder's output for a batch of sources. It belongs to the weights that made it: after a training step, encode
    again."""

    states_BSM: Tensor
    keep_BS: Tensor | None = None
    """False at padding of the source; None where there is none."""
    look: bool = True
    """Whether to look if `keep_BS` hides anything at all, for which a GPU is waited for; training does not."""
    _kept: dict[int, StepMemory] = field(default_factory=dict, init=False, repr=False)
    _whole: tuple[EncoderMemory, Tensor] | None = field(default=None, init=False, repr=False)
    """The memory that this one's rows are taken from, and their numbers."""

    def __post_init__(self) -> None:
        if self.keep_BS is not None and self.look:
            object.__setattr__(self, "keep_BS", None if bool(self.keep_BS.all()) else self.keep_BS.bool())

    def at(self, step: Step, *, keeps: bool) -> StepMemory:
        """For one step; with `keeps`, the one that holds its keys and values from call to call."""
        if not keeps:
            return StepMemory(self.states_BSM, self._mask, keeps=False)
        if self._whole is not None:
            whole, rows_R = self._whole
            return _SomeRows(whole.at(step, keeps=True), self._mask, rows_R)
        if step.index not in self._kept:
            self._kept[step.index] = StepMemory(self.states_BSM, self._mask, keeps=True)
        return self._kept[step.index]

    def select(self, rows: Sequence[int]) -> EncoderMemory:
        """Some rows, for a pass that runs only those. Their keys and values are still made and kept here, once."""
        if list(rows) == list(range(self.states_BSM.shape[0])):
            return self
        rows_R = torch.tensor(rows, device=self.states_BSM.device)
        chosen = EncoderMemory(self.states_BSM[rows_R], None if self.keep_BS is None else self.keep_BS[rows_R])
        object.__setattr__(chosen, "_whole", (self, rows_R))
        return chosen

    def bytes(self) -> int:
        """What the kept keys and values take."""
        kept = [entry for step in self._kept.values() for entry in (step.k, step.v) if entry is not None]
        return sum(entry.numel() * entry.element_size() for entry in kept)

    @property
    def _mask(self) -> Tensor | None:
        return None if self.keep_BS is None else self.keep_BS[:, None, None, :]
