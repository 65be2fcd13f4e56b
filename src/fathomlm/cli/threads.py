"""`--threads`, as every verb that computes has it."""

from __future__ import annotations

import os

from fathomlm.errors import OptionError

HELP = "processor threads to use (default: all)"


def check_threads(threads: int | None) -> None:
    """More than there are processors is never quicker, and very many end torch with a segmentation fault."""
    processors = os.cpu_count() or 1
    if threads is not None and threads < 1:
        raise OptionError(f"--threads must be at least 1, got {threads}")
    if threads is not None and threads > processors:
        raise OptionError(f"--threads must be at most {processors}, the processors of this machine; got {threads:,}")


def use_threads(threads: int | None) -> None:
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
