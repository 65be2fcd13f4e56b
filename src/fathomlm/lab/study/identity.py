"""Which code and which machine made a record."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import fathomlm
from fathomlm.lab.environment import environment as measured_in


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
    """The environment of a record, with the code that made it; a record has its own date."""
    about = measured_in(device)
    del about["date"], about["transformers"]
    return {**about, "code": code_mark()}
