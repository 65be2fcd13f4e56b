"""A pass forward and back as one CUDA graph: recorded once its shapes are known, then replayed, so that a GPU never waits
for Python between two of the thousand kernels of a forward pass.

What a graph reads and writes has fixed places: the batch and the scale of its loss are copied in, losses are read out before
the next replay, and gradients are added to tensors that stay (the loop then clears them instead of dropping them). The slow
twin is `run` itself, which the first passes of every shape take anyway: kernels are compiled and chosen in them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.train.data.loader import Batch

WARM_UPS = 3
"""Passes of a shape before it is recorded."""

RunPass = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]
"""Forward and back, the loss times a scale: the loss and its parts."""
Record = Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Callable[[], None], tuple[Tensor, Tensor]]]
"""Records work without doing it: how to do it, and where its results will be."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    batch: Batch
    scale: Tensor
    replay: Callable[[], None]
    results: tuple[Tensor, Tensor]

    def run(self, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        for name, held in self.batch.inputs.items():
            new = batch.inputs[name]
            if held is not None and new is not None:
                held.copy_(new, non_blocking=True)
        self.scale.copy_(scale)
        self.replay()
        return self.results


class CapturedPass:
    """Takes passes for the loop, by replaying where it can. Results are valid until the next pass."""

    def __init__(self, run: RunPass, learns: Sequence[Tensor], record: Record | None = None) -> None:
        """`learns` are the tensors whose gradients passes add to."""
        self._run = run
        self._learns = learns
        self._record = record or record_graph
        self._reached: list[Tensor] = []
        self._last: tuple[Hashable, int] = (None, 0)
        self._recorded: dict[Hashable, _Recorded] = {}
        self.reserved = 0
        """Bytes that graphs keep for themselves between replays."""

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients must stay where they are, cleared but not dropped."""
        return bool(self._recorded)

    def __call__(self, batch: Batch, scale: Tensor, also: Hashable) -> tuple[Tensor, Tensor]:
        """`also` is what else a pass depends on; another value of it is another pass."""
        if batch.source_BS is not None or batch.keep_BT is not None:  # whose passes ask the device how long rows are
            return self._run(batch, scale)
        key = (also, *((name, None if t is None else t.shape) for name, t in batch.inputs.items()))
        if key not in self._recorded:
            before = self._last[1] if self._last[0] == key else 0
            self._last = (key, before + 1)
            if before < WARM_UPS:
                results = self._run(batch, scale)
                self._reached = [tensor for tensor in self._learns if tensor.grad is not None]
                return results
            self._recorded[key] = self._recording(batch, scale)
        return self._recorded[key].run(batch, scale)

    def _recording(self, batch: Batch, scale: Tensor) -> _Recorded:
        for tensor in self._reached:  # only those: an optimizer decays whatever has a gradient, be it zero
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        held, held_scale = batch.copy(), scale.clone()
        before = _reserved(scale.device)
        replay, results = self._record(lambda: self._run(held, held_scale))
        self.reserved += _reserved(scale.device) - before
        return _Recorded(held, held_scale, replay, results)


def _reserved(device: torch.device) -> int:
    """Bytes that this process holds of the device's memory, those left out that nothing needs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def record_graph(work: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Callable[[], None], tuple[Tensor, Tensor]]:
    graph = torch.cuda.CUDAGraph()
    # Only this thread must keep still: another one may be pinning the next batch meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph.replay, results
