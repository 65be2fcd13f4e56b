"""Keys and values handed from one step to another within one pass: how steps share entries where there is no cache.

Shapes: B batch, G key-value heads, T tokens of the row, K of them that run this step, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fathomlm.cache.dense import Entries, StepKV
from fathomlm.depth import DepthPlan, Step


class _Pass:
    """What all entries of a single pass have in common: prefixes are made where they are needed."""

    stores = False

    def prefix(self, make: Callable[[], Entries]) -> Entries:
        return make()


class Kept(_Pass):
    """Entries that a later step will read. Two plain attributes: a compiled layer writes them without being compiled
    anew for every step."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Entries:
        self.k, self.v = k_BGTD, v_BGTD
        return k_BGTD, v_BGTD

    def entries(self) -> Entries:
        assert self.k is not None
        assert self.v is not None
        return self.k, self.v


class Overwritten(_Pass):
    """Another step's entries, with this step's own written over them at the tokens that run it (hybrid sharing)."""

    def __init__(self, base: Entries, at_BK: Tensor, valid_BK: Tensor | None = None) -> None:
        """Tokens that are not valid run the step only to fill its shape, and write nothing."""
        self._k, self._v = base
        self._at, self._valid = at_BK, valid_BK

    def append(self, k_BGKD: Tensor, v_BGKD: Tensor) -> Entries:
        return self._over(self._k, k_BGKD), self._over(self._v, v_BGKD)

    def _over(self, base_BGTD: Tensor, own_BGKD: Tensor) -> Tensor:
        where = self._at[:, None, :, None].expand(-1, base_BGTD.shape[1], -1, base_BGTD.shape[3])
        own_BGKD = own_BGKD.to(base_BGTD.dtype)
        if self._valid is not None:
            own_BGKD = torch.where(self._valid[:, None, :, None], own_BGKD, base_BGTD.gather(2, where))
        return base_BGTD.scatter(2, where, own_BGKD)


class Blended(_Pass):
    """The same over whole rows: a step's own entries where a token is active, the other step's elsewhere."""

    def __init__(self, base: Entries, active_BT: Tensor) -> None:
        self._k, self._v = base
        self._active = active_BT

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Entries:
        active = self._active[:, None, :, None]
        return torch.where(active, k_BGTD, self._k), torch.where(active, v_BGTD, self._v)


class RolledEntries(_Pass):
    """Entries of a layer that runs again over the same tokens, each time over its own output (a draft layer in training):
    those of all times so far, one after the other. As many heads of keys as of queries, so that every kernel takes them
    with a mask."""

    def __init__(self, repeats: int) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self._repeats = repeats

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Entries:
        k, v = (x if self._repeats == 1 else x.repeat_interleave(self._repeats, dim=1) for x in (k_BGTD, v_BGTD))
        self.k = k if self.k is None else torch.cat((self.k, k), dim=2)
        self.v = v if self.v is None else torch.cat((self.v, v), dim=2)
        return self.k, self.v


class NoCache:
    """The entries of one pass, by step. Without sharing it holds nothing, and steps attend to what they make themselves."""

    def __init__(self, plan: DepthPlan, rolled: RolledEntries | None = None) -> None:
        """`rolled` are the entries of a step that no other reads and that runs several times."""
        self._plan = plan
        self._rolled = rolled
        self._sources = {source for i, source in enumerate(plan.kv_sources) if source != i}
        self._kept: dict[int, Kept] = {}
        self._at_BK: Tensor | None = None
        self._valid_BK: Tensor | None = None
        self._active_BT: Tensor | None = None

    def focus(
        self, *, at_BK: Tensor | None = None, valid_BK: Tensor | None = None, active_BT: Tensor | None = None
    ) -> NoCache:
        """Which tokens run the steps to come: gathered ones by their slots, or a part of whole rows."""
        self._at_BK, self._valid_BK, self._active_BT = at_BK, valid_BK, active_BT
        return self

    def at(self, step: Step) -> StepKV | None:
        if step.part == "exit":  # nobody else reads what an exit's own layer makes
            return self._rolled
        source = self._plan.kv_sources[step.index]
        if source == step.index:
            return self._kept.setdefault(step.index, Kept()) if step.index in self._sources else None
        if self._plan.kv != "hybrid":
            return None
        base = self._kept[source].entries()
        if self._at_BK is not None:
            return Overwritten(base, self._at_BK, self._valid_BK)
        return None if self._active_BT is None else Blended(base, self._active_BT)

    def reads(self, step: Step) -> Entries | None:
        return self._kept[self._plan.kv_sources[step.index]].entries() if self._plan.reads_kv(step) else None
