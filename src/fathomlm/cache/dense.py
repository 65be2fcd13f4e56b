"""The dense cache: every token's key and value at every step. The oracle that every other cache is held against.

Shapes: B batch, G key-value heads, S stored slots, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fathomlm.depth import Step


class StepKV(Protocol):
    """What attention sees of a cache: the entries of one step."""

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new entries and return all of them."""
        ...

    def prefix(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The step's trained prefix entries, made once and kept beside the tokens' own."""
        ...


class _Buffer:
    """One step's entries in a buffer that doubles, so that a token costs one small copy and not a new cache."""

    __slots__ = ("_k", "_prefix", "_reserve", "_used", "_v")

    def __init__(self, reserve: int) -> None:
        self._reserve = reserve
        self._used = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._prefix: tuple[Tensor, Tensor] | None = None

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        B, G, T, D = k_BGTD.shape
        end = self._used + T
        if self._k is None or self._v is None or end > self._k.shape[2]:
            room = max(end, self._reserve, 2 * self._used)
            k, v = k_BGTD.new_empty(B, G, room, D), v_BGTD.new_empty(B, G, room, D)
            if self._k is not None and self._v is not None:
                k[:, :, : self._used] = self._k[:, :, : self._used]
                v[:, :, : self._used] = self._v[:, :, : self._used]
            self._k, self._v = k, v
        self._k[:, :, self._used : end] = k_BGTD
        self._v[:, :, self._used : end] = v_BGTD
        self._used = end
        return self._k[:, :, :end], self._v[:, :, :end]

    def prefix(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if self._prefix is None:
            self._prefix = make()
        return self._prefix

    def truncate(self, length: int) -> None:
        self._used = min(self._used, length)

    def bytes(self) -> int:
        return 0 if self._k is None or self._v is None else 2 * self._k[:, :, : self._used].numel() * self._k.element_size()


class DenseCache:
    """Key-value entries of a whole sequence batch, one buffer a step."""

    def __init__(self, steps: int, reserve: int = 64) -> None:
        """`reserve` is how many slots to set aside at first; the buffers grow past it when they must."""
        self._steps = [_Buffer(reserve) for _ in range(steps)]
        self._length = 0

    @property
    def length(self) -> int:
        """Slots filled so far, padding included. Counted here, never read off a step: deep steps may hold fewer."""
        return self._length

    def at(self, step: Step) -> StepKV:
        return self._steps[step.index]

    def advance(self, tokens: int) -> None:
        """Note that a forward pass has appended `tokens` at every step."""
        self._length += tokens

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` slots."""
        self._length = min(self._length, length)
        for buffer in self._steps:
            buffer.truncate(length)

    def bytes(self) -> int:
        """What the stored entries take, spare room left out."""
        return sum(buffer.bytes() for buffer in self._steps)


def stack_prefix(prefix: Tensor, entries_BGSD: Tensor) -> Tensor:
    """A prefix (1, G, P, D), the same for every row, in front of the tokens' own entries."""
    return torch.cat((prefix.expand(entries_BGSD.shape[0], -1, -1, -1), entries_BGSD), dim=2)
