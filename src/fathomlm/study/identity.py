"""Which code and which machine made a record."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import fathomlm


def commit_of_checkout() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` where it was changed; None outside one."""
    root = Path(fathomlm.__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=root, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def code_mark() -> str:
    """What the package's code is known by, also where there is no checkout."""
    root, digest = Path(fathomlm.__file__).resolve().parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(device: str) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available() and not device.startswith("cpu")
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fathomlm": fathomlm.__version__,
        "code": code_mark(),
    }
