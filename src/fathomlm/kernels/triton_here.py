"""Triton where it is installed; torch for CPUs comes without it, and every kernel here has a plain twin."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

_found = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if _found else None
tl: Any = importlib.import_module("triton.language") if _found else None
EARLY_ROWS = int(os.environ.get("FATHOMLM_EARLY_LAUNCH", "1"))
EARLY_DRAFTS = int(os.environ.get("FATHOMLM_EARLY_DRAFTS", "64"))
"""The same for passes that draft or verify drafts, where that is more: rows of one or a few sequences."""
FEW_DRAFTS = os.environ.get("FATHOMLM_FEW_DRAFTS", "1") == "1"
"""Whether these passes have the kernels of `few_rows` and `few_attention`."""
_more = [0]


def early_launch(rows: int) -> dict[str, bool]:
    """Settings of a kernel that may start while the one in front of it still runs (programmatic dependent launch, from
    Hopper on). Each of its programs first lets the next kernel start, may then load what no kernel writes, its weight, and
    waits for the kernel in front before it reads or writes anything else: the way from one kernel to the next then hides
    behind loads. Every kernel launched so must wait, since the next one counts on it. For one row only: programs of several
    rows are large, and those that start early crowd where there is room instead of spreading (32 rows of a 360M model: 18 %
    slower); `FATHOMLM_EARLY_LAUNCH` says up to how many, 0 for none. Compiled graphs launch in their own way."""
    if rows > max(EARLY_ROWS, _more[0]) or torch.compiler.is_compiling() or not _starts_early():
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@contextlib.contextmanager
def launching_early(rows: int) -> Iterator[None]:
    """`early_launch` for up to so many rows, whatever else is the limit, unless early launches are off."""
    before, _more[0] = _more[0], rows
    try:
        yield
    finally:
        _more[0] = before


@functools.cache
def _starts_early() -> bool:
    asked = EARLY_ROWS > 0 and os.environ.get("TRITON_INTERPRET") != "1"
    return asked and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


if triton is not None:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def let_next_start(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
        if EARLY:
            gdc_launch_dependents()

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def wait_for_last(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
        if EARLY:
            gdc_wait()


__all__ = ["EARLY_DRAFTS", "FEW_DRAFTS", "early_launch", "launching_early", "tl", "triton"]
