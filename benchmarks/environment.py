"""The environment a figure was measured in: every benchmark record carries it."""

from __future__ import annotations

import platform
from datetime import date
from typing import Any

import torch
import transformers

import fathomlm


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "date": date.today().isoformat(),
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fathomlm": fathomlm.__version__,
    }
