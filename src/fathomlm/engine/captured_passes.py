"""Passes on a GPU that are captured by their size and replayed: those over short prompts and short sources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ONE_AT_A_TIME = threading.Lock()
"""torch lets go of its unused memory where a capture begins, which must not be while another one is under way."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Only the thread that captures must keep still: engines of other models, and those that are being loaded, have threads
    of their own, which allocate memory and ask for events meanwhile."""
    with ONE_AT_A_TIME, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


class CapturedPasses:
    """Passes of a few sizes, each of which reads one tensor: the second of a size is captured, and replayed from then on."""

    def __init__(self, run: Callable[[Tensor], None], *, captures: bool) -> None:
        """`run` must not ask the device for anything. Without `captures` every pass is run."""
        self._run, self._captures = run, captures
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        self._pool: Any = None

    def __call__(self, given: Tensor, size: Hashable | None) -> None:
        """`size` tells passes apart, and None is one that is run as it is."""
        if size is None or not self._captures or size not in self._met:
            if size is not None:
                self._met.add(size)
            self._run(given)
            return
        if size not in self._graphs:
            self._graphs[size] = self._capture(given.clone())
        mine, graph = self._graphs[size]
        mine.copy_(given)
        graph.replay()

    def _capture(self, given: Tensor) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            self._run(given)
        self._pool = self._pool or graph.pool()
        return given, graph
