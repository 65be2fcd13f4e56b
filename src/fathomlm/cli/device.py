"""What every verb that computes shares: `--threads`, and what is said when the device's memory is too small."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from fathomlm.errors import OptionError

HELP = "processor threads to use (default: all)"
CPU_FULL = re.compile(
    "can't allocate memory|not enough memory|Storage size calculation overflowed|integer multiplication overflow"
)


def check_threads(threads: int | None) -> None:
    """More than there are processors is never quicker, and very many end torch with a segmentation fault."""
    processors = os.cpu_count() or 1
    if threads is not None and threads < 1:
        raise OptionError(f"--threads must be >= 1, got {threads}")
    if threads is not None and threads > processors:
        raise OptionError(f"--threads must be <= {processors}, the processors of this machine; got {threads:,}")


def use_threads(threads: int | None) -> None:
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def memory_errors(lower: str) -> Iterator[None]:
    """Too much for the device is a mistake of the settings: `lower` names what to lower."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:  # a GPU's has a type of its own, a CPU's is known by its words
        told = (str(error).splitlines() or [""])[0]
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not CPU_FULL.search(told):
            raise
        why = told.rpartition("DefaultCPUAllocator: ")[2]
        raise OptionError(f"the device has too little memory for this; lower {lower} ({why})") from error
