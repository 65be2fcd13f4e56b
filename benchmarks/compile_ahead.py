"""Kernels compiled on all cores before anything is timed: processes of their own leave what they compile in a cache."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable


def compile_ahead(compile_share: Callable[[int, int], None], seconds: float) -> None:
    """Call `compile_share(number, workers)` in as many processes as there are cores to spare, and end those that take longer
    than so many seconds: the measurement compiles what is missing."""
    workers, end = max(1, min(15, (os.cpu_count() or 2) - 1)), time.monotonic() + seconds
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=compile_share, args=(number, workers)) for number in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.terminate()
