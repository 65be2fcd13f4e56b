"""Saving a model as a FathomLM directory: each weight once, tokenizer beside it, whole or not at all."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers.utils import logging as hf_logging

from fathomlm.checkpoints.int8 import INT8, check_int8, quantized_tensors
from fathomlm.checkpoints.shards import SHARD_BYTES, write_shards
from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.errors import OptionError, choices
from fathomlm.model.seq2seq import FathomModel


def weight_bytes(model: FathomModel) -> int:
    """What the weights take, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def save(
    model: FathomModel,
    out: str | Path,
    force: bool = False,
    *,
    quantize: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """`save_pretrained`, made atomic. `quantize="int8"` stores matrices as integers with a scale for each row; files are
    split at `shard_bytes`."""
    out = Path(out)
    if quantize not in (None, INT8):
        raise OptionError(choices("quantize", str(quantize), [INT8]))
    if shard_bytes < 1:
        raise OptionError(f"shard size must be >= 1 byte, got {shard_bytes}")
    if quantize is not None:
        check_int8(model)
    check_room(out, weight_bytes(model))
    with whole_directory(out, force) as directory:
        hf_logging.disable_progress_bar()
        if quantize is not None:
            _save_int8(model, directory, shard_bytes)
        else:
            model.save_pretrained(directory, max_shard_size=shard_bytes)
    return out


def _save_int8(model: FathomModel, directory: Path, shard_bytes: int) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.weight_format = INT8
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    write_shards(directory, quantized_tensors(model), shard_bytes)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(directory)


def directory_bytes(path: Path) -> int:
    """The size on disk of a model directory's files, or of one file."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
