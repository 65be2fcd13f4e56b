"""What is checked first, before a tensor library is imported: names, paths, devices and sizes (`option(first=...)`)."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from fathomlm.errors import DataError, OptionError, OutputError

DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")


def check_model(source: str) -> None:
    """Refuse a model that is not there."""
    from fathomlm.checkpoints.locate import check_source

    check_source(source)


def check_shape(source: str) -> None:
    """The same where only the configuration is read."""
    from fathomlm.checkpoints.locate import check_source

    check_source(source, shape=True)


def check_pack(path: Path) -> None:
    """Refuse a directory that has no exits."""
    from fathomlm.checkpoints.locate import check_exits

    check_exits(path)


def check_device(device: str) -> None:
    """Refuse what is no device, and CUDA where torch is built without it or no driver is installed; what remains, torch
    knows."""
    if DEVICE.fullmatch(device) is None:
        raise OptionError(f"unknown device '{device}'; write cpu, cuda or cuda:0")
    version = importlib.metadata.version("torch")
    if not device.startswith("cuda") or "rocm" in version:
        return
    if version.endswith("+cpu") or (sys.platform == "linux" and not _has_driver()):
        raise OptionError(f"'{device}' requires CUDA, but torch {version} finds no such device here; use cpu")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_threads(threads: int) -> None:
    """More than there are processors is never faster, and very many end torch with a segmentation fault."""
    processors = os.cpu_count() or 1
    if threads > processors:
        raise OptionError(f"--threads must be <= {processors}, the processors of this machine; got {threads:,}")


def check_text(source: str) -> None:
    """Refuse text that is not there, or of an unknown kind; a corpus is read by what asks for it."""
    from fathomlm.train.data.sources import expand

    if not (Path(source).expanduser() / "corpus.json").is_file():
        expand([source])


def check_file(path: Path) -> None:
    from fathomlm.train.data.sources import missing

    if not path.expanduser().exists():
        raise DataError(missing(path, "file"))


def check_memory(requested: int | None, device: str) -> None:
    """Refuse what the machine does not have before a model is loaded for it."""
    if requested is None:
        return
    if device.startswith("cuda"):
        import torch

        has = torch.cuda.mem_get_info(device)[1] if torch.cuda.is_available() else requested
    else:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if requested > has:
        raise OptionError(f"--memory is {requested / 1e9:,.1f} GB, but {device} has {has / 1e9:,.1f} GB")


def check_new_file(out: Path) -> None:
    """Refuse now what could not be written later."""
    if out.exists():
        raise OutputError(f"{out} exists; choose another name")
    check_written_file(out)


def check_written_file(out: Path) -> None:
    """The same for a file that may be there already."""
    if out.is_dir():
        raise OutputError(f"cannot write {out}: it is a directory; name a file in it")
    if not (place := out.absolute().parent).is_dir():
        raise OutputError(f"cannot write {out}: {out.parent} is not a directory")
    _check_open(out, place)


def check_written_directory(out: Path) -> None:
    """The same for a directory that is made where there is none, and to which files are added otherwise."""
    place = next(place for place in (out.absolute(), *out.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise OutputError(f"cannot write {out}: {place} is not a directory")
    _check_open(out, place)


def _check_open(out: Path, place: Path) -> None:
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {out}: permission denied in {place}")
