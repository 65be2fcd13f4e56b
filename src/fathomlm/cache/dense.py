"""The dense cache: every token's key and value at every step. The oracle that every other cache is held against.

Shapes: B batch, G key-value heads, S stored slots, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fathomlm.depth import DepthPlan, Step

Entries = tuple[Tensor, Tensor]
"""Keys and values, (B, G, S, D) each."""


class StepKV(Protocol):
    """What attention sees of a cache: the entries of one step."""

    @property
    def stores(self) -> bool:
        """Whether entries outlive the pass; if not, a compiled training step may use its faster forms."""
        ...

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new entries and return all of them."""
        ...

    def prefix(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The step's trained prefix entries, made once and kept beside the tokens' own."""
        ...


class Cache(Protocol):
    """What the decoder asks of a key-value cache."""

    @property
    def length(self) -> int: ...

    def at(self, step: Step) -> StepKV | None: ...

    def reads(self, step: Step) -> Entries | None: ...

    def advance(self, tokens: int) -> None: ...


class StoredEntries:
    """What every cache has of one step: buffers of keys and values, and the entries of its trained prefix."""

    stores = True

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self._prefix: Entries | None = None

    def prefix(self, make: Callable[[], Entries]) -> Entries:
        if self._prefix is None:
            self._prefix = make()
        return self._prefix

    def first(self, entries: int) -> Entries:
        """So many of each row."""
        assert self.k is not None
        assert self.v is not None
        return self.k[:, :, :entries], self.v[:, :, :entries]

    def grow(self, like_BGTD: Tensor, rows: int, longest: int, reserve: int = 0) -> Entries:
        """The buffers, all of them, with room for `longest` entries of each of `rows` rows."""
        self.k = _grown(self.k, like_BGTD, rows, longest, reserve)
        self.v = _grown(self.v, like_BGTD, rows, longest, reserve)
        return self.k, self.v


def _grown(held: Tensor | None, like_BGTD: Tensor, rows: int, longest: int, reserve: int) -> Tensor:
    """It doubles, so that a token costs one small copy and not a new cache. Zeros and not just any memory: what is hidden
    must still be a number."""
    if held is not None and held.shape[2] >= longest:
        return held
    _, G, _, D = like_BGTD.shape
    room = like_BGTD.new_zeros(rows, G, max(longest, reserve if held is None else 2 * held.shape[2]), D)
    if held is not None:
        room[:, :, : held.shape[2]] = held
    return room


class Buffer(StoredEntries):
    """One step's entries, as many of every row."""

    def __init__(self, reserve: int) -> None:
        super().__init__()
        self._reserve = reserve
        self._used = 0

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Entries:
        k, v = self.room(k_BGTD)
        end = self._used + k_BGTD.shape[2]
        k[:, :, self._used : end] = k_BGTD
        v[:, :, self._used : end] = v_BGTD
        self._used = end
        return self.entries()

    def room(self, like_BGTD: Tensor) -> Entries:
        """The buffers, all of them, with room for so many more entries."""
        return self.grow(like_BGTD, like_BGTD.shape[0], self._used + like_BGTD.shape[2], self._reserve)

    @property
    def used(self) -> int:
        return self._used

    def note(self, entries: int) -> None:
        """So many were written to `room`."""
        self._used += entries

    def entries(self) -> Entries:
        """All entries so far."""
        return self.first(self._used)

    def truncate(self, length: int) -> None:
        self._used = min(self._used, length)

    def bytes(self) -> int:
        return 0 if self.k is None or self.v is None else 2 * self.k[:, :, : self._used].numel() * self.k.element_size()


class DenseCache:
    """Key-value entries of a whole sequence batch, one buffer a step."""

    def __init__(self, plan: DepthPlan, reserve: int = 64, kv_loops: int | None = None) -> None:
        """`reserve` is how many slots to set aside at first; the buffers grow past it when they must. With `kv_loops` a loop
        stores over what the loop so many before it has stored: earlier tokens are seen as the last of these loops left
        them, and memory does not grow with the number of loops (Huginn)."""
        self._plan = plan
        self._overwrites = kv_loops is not None
        places: dict[tuple[int, int], Buffer] = {}
        self._steps: dict[int, Buffer] = {}
        for step in (step for step in plan if not plan.reads_kv(step)):
            loop = step.recursion if kv_loops is None else step.recursion % kv_loops
            self._steps[step.index] = places.setdefault((step.layer, loop), Buffer(reserve))
        self._length = 0

    @property
    def length(self) -> int:
        """Slots filled so far, padding included. Counted here, never read off a step: deep steps may hold fewer."""
        return self._length

    def at(self, step: Step) -> StepKV | None:
        buffer = self._steps.get(step.index)
        if self._overwrites and buffer is not None:
            buffer.truncate(self._length)
        return buffer

    def reads(self, step: Step) -> Entries | None:
        """The entries that a step attends to without making any, where keys and values are shared."""
        return self._steps[self._plan.kv_sources[step.index]].entries() if self._plan.reads_kv(step) else None

    def advance(self, tokens: int) -> None:
        """Note that a forward pass has appended `tokens` at every step."""
        self._length += tokens

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` slots."""
        self._length = min(self._length, length)
        for buffer in self._steps.values():
            buffer.truncate(length)

    def bytes(self) -> int:
        """What the stored entries take, spare room left out."""
        return sum(buffer.bytes() for buffer in {id(buffer): buffer for buffer in self._steps.values()}.values())


def stack_prefix(prefix: Tensor, entries_BGSD: Tensor) -> Tensor:
    """A prefix (1, G, P, D), the same for every row, in front of the tokens' own entries."""
    return torch.cat((prefix.expand(entries_BGSD.shape[0], -1, -1, -1), entries_BGSD), dim=2)
