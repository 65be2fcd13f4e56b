"""cpu_rows.c, compiled for this processor on first use and kept; None where there is no compiler.

The library takes OpenMP from torch, which has it loaded: two pools of threads would fight for the same cores. So it is
linked without it at first, and with the compiler's own only where torch has none to offer.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fathomlm.errors import OutputError

COMPILERS = ("cc", "gcc", "clang")
OPTIMISED = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi")
TUNED = ("-march=native", "-mcpu=native")
"""What compilers of different processors call the same."""
SECONDS = 300


class CpuLibrary:
    """The compiled functions. It is opened again where it is copied or sent to another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        for name in ("fathom_linear", "fathom_steps"):
            getattr(self._functions, name).restype = None
        self.linear: Any = self._functions.fathom_linear
        self.linear.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self.steps: Any = self._functions.fathom_steps
        self.steps.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 9]

    def __reduce__(self) -> tuple[Any, ...]:
        return CpuLibrary, (self.path,)


def compiler() -> str | None:
    """The one that is used; None where there is none."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def build_library(directory: Path) -> CpuLibrary | None:
    """The library out of `directory`, compiled there unless it is; None where nothing here compiles it."""
    command = compiler()
    if command is None:
        return None
    source = (resources.files("fathomlm.kernels") / "cpu_rows.c").read_bytes()
    key = hashlib.sha256(b"\0".join((source, _processor().encode(), torch.__version__.encode(), command.encode())))
    target = directory / f"cpu_rows-{key.hexdigest()[:16]}.so"
    if target.is_file() and (library := _opened(target)) is not None:
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            (place := Path(scratch) / "cpu_rows.c").write_bytes(source)
            for tuned in TUNED:
                for threads, linked in ((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], [])):
                    made = _compile(command, place, [*OPTIMISED, tuned, *threads], linked)
                    if made is not None and _opened(made) is not None:
                        os.replace(made, target)
                        return _opened(target)
    except OSError as error:
        raise OutputError(f"cannot keep the compiled kernels in {directory}: {error.strerror}") from error
    return None


def _compile(compiler: str, source: Path, flags: Sequence[str], linked: Sequence[str]) -> Path | None:
    made, out = source.with_suffix(".o"), source.with_suffix(".so")
    link = ["-shared", "-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else ["-shared"]
    for command in (
        [compiler, *flags, "-c", str(source), "-o", str(made)],
        [compiler, *link, *linked, str(made), "-o", str(out), "-lm"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
    return out


def _opened(path: Path) -> CpuLibrary | None:
    """None where it does not load: made for another machine, or without the OpenMP that it counts on."""
    try:
        return CpuLibrary(path)
    except (OSError, AttributeError):
        return None


def _processor() -> str:
    """What the compiler tunes for: a home directory may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kept = ("model name", "flags", "features", "cpu part", "cpu implementer")
    told = {line for line in lines if line.lower().startswith(kept)}
    return "\n".join((platform.machine(), platform.processor(), *sorted(told)))
