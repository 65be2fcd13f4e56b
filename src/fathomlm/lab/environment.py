"""The environment that a figure was measured in: every record carries it."""

from __future__ import annotations

import gc
import platform
from datetime import date
from typing import Any

import fathomlm


def environment(device: str = "auto") -> dict[str, Any]:
    """Without it a figure says nothing. `auto` is the GPU where there is one."""
    import torch
    import transformers

    gpu = torch.cuda.is_available() if device == "auto" else torch.device(device).type == "cuda"
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(None if device == "auto" else device) if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fathomlm": fathomlm.__version__,
    }


def free_memory() -> None:
    """Give back what the last model or run held: its graphs and weights live in cycles that only the collector finds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
