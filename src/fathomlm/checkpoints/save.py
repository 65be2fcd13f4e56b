"""Saving a model as a FathomLM directory: each weight once, tokenizer beside it, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging as hf_logging

from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.model.seq2seq import FathomModel


def weight_bytes(model: FathomModel) -> int:
    """What the weights take, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def save(model: FathomModel, out: str | Path, force: bool = False) -> Path:
    """`save_pretrained`, made atomic."""
    out = Path(out)
    check_room(out, weight_bytes(model))
    with whole_directory(out, force) as directory:
        hf_logging.disable_progress_bar()
        model.save_pretrained(directory)
    return out


def directory_bytes(path: Path) -> int:
    """The size on disk of a model directory's files, or of one file."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
