"""The static cache: one row's entries in buffers that never move or grow, written at slots that a tensor names.

Nothing in a pass then depends on a number of the host: the same recorded work (a CUDA graph) serves every token. Queries
look at whole buffers, and a mask made of the slots hides what is not there yet.

Shapes: G key-value heads, N tokens of a pass, S slots, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fathomlm.cache.dense import Entries, StepKV
from fathomlm.depth import Architecture, DepthPlan, Step


class _Fixed:
    """One step's entries."""

    stores = True

    def __init__(self, k_1GSD: Tensor, v_1GSD: Tensor) -> None:
        self.k, self.v = k_1GSD, v_1GSD
        self.slots_N = torch.empty(0, dtype=torch.long, device=k_1GSD.device)
        self._prefix: Entries | None = None

    def append(self, k_1GND: Tensor, v_1GND: Tensor) -> Entries:
        self.k.index_copy_(2, self.slots_N, k_1GND)
        self.v.index_copy_(2, self.slots_N, v_1GND)
        return self.k, self.v

    def prefix(self, make: Callable[[], Entries]) -> Entries:
        if self._prefix is None:
            self._prefix = make()
        return self._prefix


class StaticCache:
    """Entries of one row of at most `length` tokens, and one slot more, `scratch`, for what nobody will read."""

    def __init__(
        self,
        architecture: Architecture,
        plan: DepthPlan,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        exits: Sequence[int] = (),
    ) -> None:
        """`exits` are those whose own layers will run, where they have any."""
        self.length = length
        self._plan = plan
        shape = (1, architecture.kv_heads, length + 1, architecture.head_dim)
        self._steps = {
            step.index: _Fixed(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))
            for step in (*plan, *plan.exit_steps(exits))
            if not plan.reads_kv(step)
        }

    @property
    def scratch(self) -> int:
        return self.length

    def focus(self, slots_N: Tensor) -> None:
        """Where the tokens of the passes to come are; the tensor may be filled anew between them."""
        for fixed in self._steps.values():
            fixed.slots_N = slots_N

    def at(self, step: Step) -> StepKV | None:
        return self._steps.get(step.index)

    def reads(self, step: Step) -> Entries | None:
        if not self._plan.reads_kv(step):
            return None
        source = self._steps[self._plan.kv_sources[step.index]]
        return source.k, source.v

    def advance(self, tokens: int) -> None:
        """Nothing to note: slots say where entries are."""

    def entries(self, step: Step) -> Entries:
        """All keys and values of a step, (G, S, D) each, spare slots included."""
        fixed = self._steps[step.index]
        return fixed.k[0], fixed.v[0]
