"""How the records of `bench` begin and end: where a figure was measured, and what is said when that broke off."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any

from fathomlm.errors import OptionError

CPU_FULL = re.compile(
    "can't allocate memory|not enough memory|Storage size calculation overflowed|integer multiplication overflow"
)


def about(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """How every record begins."""
    return {
        "kind": args.kind,
        "model": args.model,
        "dtype": dtype,
        "device": args.device,
        "environment": environment(args.device),
    }


def environment(device: str) -> dict[str, Any]:
    """Without it a figure says nothing."""
    import torch
    import transformers

    from fathomlm import __version__

    gpu = torch.device(device).type == "cuda"
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fathomlm": __version__,
    }


def print_record(record: dict[str, Any]) -> None:
    from fathomlm.train.report import strict

    print(json.dumps(strict(record), ensure_ascii=False, allow_nan=False))


def say_interrupted() -> None:
    print("fathomlm: interrupted; this is what was measured so far", file=sys.stderr)


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
