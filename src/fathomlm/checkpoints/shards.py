"""Tensors of a safetensors directory, read one at a time, written a file at a time. Pickles are refused: nothing from a
checkpoint is executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fathomlm.errors import CheckpointError
from fathomlm.fields import shown
from fathomlm.jsonfile import read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD_BYTES = 4_000_000_000
"""How large a file may be unless another size is asked for."""
MAX_INDEX = 32 << 20
"""Of an index; the largest public one has 9 MB."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types whose values are looked at: torch cannot ask all of those of one byte."""
_HEADER = 256
"""More than a file's header says of a tensor beside its name: type, shape and place; and of the file itself."""


class Shards:
    """The safetensors files of a directory, by tensor name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, or an error that says which file lacks it or is broken."""
        if name not in self._where:
            raise CheckpointError(f"{self.directory}: the checkpoint has no tensor '{name}'")
        file = self._where[name]
        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file} is corrupt: cannot read '{name}' ({error})") from error
        if tensor.dtype in _FLOATS and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.directory / file} has NaN or infinite values in '{name}'")
        return tensor

    def _locate(self) -> dict[str, str]:
        """Which file holds each tensor. Missing shards are found here, before any work is done."""
        index = self.directory / INDEX
        if index.is_file():
            where = self._read_index(index)
            if missing := sorted({f for f in where.values() if not (self.directory / f).is_file()}):
                raise CheckpointError(f"{self.directory} is missing {', '.join(missing)}, named in {INDEX}")
            for file in sorted(set(where.values())):
                held = set(self._open(file).keys())
                if lost := sorted(n for n, f in where.items() if f == file and n not in held):
                    raise CheckpointError(f"{self.directory / file} is missing tensor '{lost[0]}', named in {INDEX}")
            return dict(where)
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        found = sorted(file.name for pattern in PICKLES for file in self.directory.glob(pattern))
        if found:
            raise CheckpointError(
                f"{self.directory} has pickled weights only ({found[0]}), which can run code when loaded and are refused; "
                f"save the model again as safetensors"
            )
        raise CheckpointError(f"{self.directory} has no weights: neither {SINGLE} nor {INDEX} is there")

    def _read_index(self, index: Path) -> dict[str, str]:
        """Files are named, not found by path: an index must not reach outside its directory. A file may be a link, as in
        the hub's cache; those are made by whoever made the directory, never by what an index says."""
        where = read_object(index, error=CheckpointError, max_bytes=MAX_INDEX).record("weight_map", default=None)
        if where is None or not len(where):
            raise CheckpointError(f"{index} has no weight_map")
        found = {name: where.text(name) for name in where}
        for file in dict.fromkeys(found.values()):
            if file != Path(file).name or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: weight_map must name safetensors files of its own directory, got {shown(file)}"
                )
        return found

    def check_layers(self, layers: int) -> None:
        """Refuse a configuration with more layers than there are tensors, before anything is laid out for each of them."""
        if layers > len(self._where):
            raise CheckpointError(
                f"{self.directory}: config.json asks for {layers:,} layers, and the files hold {len(self._where):,} tensors"
            )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.directory / file
            try:
                path.open("rb").close()  # the library says of every file that it cannot open that there is none
                self._files[file] = safe_open(str(path), framework="pt")
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
            except SafetensorError as error:
                raise CheckpointError(f"{path} is corrupt or truncated ({error})") from error
        return self._files[file]


def write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]], limit: int) -> None:
    """Files of at most `limit` bytes, held one at a time, with an index where there are several. A tensor that is larger
    than that has a file of its own."""
    where: dict[str, str] = {}
    total = held = 0
    batch: dict[str, torch.Tensor] = {}
    files: list[Path] = []

    def flush() -> None:
        file = directory / f"shard-{len(files):05d}.safetensors"
        save_file(batch, file, metadata={"format": "pt"})
        where.update(dict.fromkeys(batch, file.name))
        files.append(file)
        batch.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        room = size + len(name) + _HEADER
        if batch and held + room > limit:
            flush()
            held = 0
        # A copy, because tied layers are one storage here and each needs its own place in the file.
        batch[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += room
        total += size
    flush()
    if len(files) == 1:
        files[0].rename(directory / SINGLE)
        return
    final = {f.name: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, f in enumerate(files)}
    for file in files:
        file.rename(directory / final[file.name])
    index = {"metadata": {"total_size": total}, "weight_map": {name: final[file] for name, file in where.items()}}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    return dict(read_object(path, error=CheckpointError).values)
