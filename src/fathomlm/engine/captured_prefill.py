"""Short prompts on a GPU: a forward pass over them is captured by its size, and replayed.

A pass over prompts is launched kernel by kernel, which takes the host longer than the device needs for a few hundred tokens
of a small model: an answer's first token waits for Python. So rows that stand for nothing are added until there are as many
as one of a few sizes, and the second pass of a size is captured; the first has compiled its kernels. Long passes and wide
layers keep the device busy by themselves, and are launched as they are: there, rows that stand for nothing would cost time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fathomlm.engine.device_state import PrefillBatch
from fathomlm.model.decoder import Decoder

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
ONE_AT_A_TIME = threading.Lock()
"""torch lets go of its unused memory where a capture begins, which must not be while another one is under way."""
LAUNCH_S = 150e-6
"""What a layer's kernels take the host to launch."""
SPEED = {2: 4e14, 4: 5e13}
"""Multiplications and additions per second that a GPU reaches in prompts, by the bytes of a number."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Only the thread that captures must keep still: engines of other models, and those that are being loaded, have threads
    of their own, which allocate memory and ask for events meanwhile."""
    with ONE_AT_A_TIME, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


def sizes_for(decoder: Decoder) -> tuple[int, ...]:
    """Those in which a layer takes the device no longer than the host. Linears are counted by their sizes: weights in
    integers are no parameters."""
    widest = max(
        sum(part.in_features * part.out_features for part in layer.modules() if isinstance(part, nn.Linear))
        for layer in decoder.layers
    )
    speed = SPEED.get(decoder.embed.weight.element_size(), SPEED[4])
    return tuple(size for size in SIZES if 2 * widest * size / speed <= LAUNCH_S)


class CapturedPrefill:
    def __init__(self, run: Callable[[PrefillBatch], None], sizes: tuple[int, ...], *, captures: bool) -> None:
        """`run` is a program's prefill, which must not ask the device for anything. Without `captures` rows are only
        added."""
        self._run, self.sizes, self._captures = run, sizes, captures
        self._met: set[int] = set()
        self._graphs: dict[int, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        self._pool: Any = None

    def size(self, tokens: int) -> int | None:
        """How many rows a pass over so many tokens has; None where it is run as it is."""
        return next((size for size in self.sizes if size >= tokens), None)

    def __call__(self, columns_CN: Tensor, size: int | None) -> None:
        """Prefill what the columns of a batch say; they have `size` rows, where that is one of the sizes."""
        if size is None or not self._captures or size not in self._met:
            if size is not None:
                self._met.add(size)
            self._run(PrefillBatch(*columns_CN))
            return
        if size not in self._graphs:
            self._graphs[size] = self._capture(columns_CN.clone())
        mine_CN, graph = self._graphs[size]
        mine_CN.copy_(columns_CN)
        graph.replay()

    def _capture(self, columns_CN: Tensor) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            self._run(PrefillBatch(*columns_CN))
        self._pool = self._pool or graph.pool()
        return columns_CN, graph
