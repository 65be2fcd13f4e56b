"""Triton where it is installed; torch for CPUs comes without it, and every kernel here has a plain twin."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_found = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if _found else None
tl: Any = importlib.import_module("triton.language") if _found else None

__all__ = ["tl", "triton"]
