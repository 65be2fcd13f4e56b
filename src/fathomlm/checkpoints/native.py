"""FathomLM directories: config.json of type `fathomlm`, safetensors with each weight once, tokenizer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.assemble import fill, finish
from fathomlm.checkpoints.huggingface import read_tokenizer
from fathomlm.checkpoints.shards import Shards
from fathomlm.errors import CheckpointError, FathomError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, empty_model

PREFIX = "decoder."


def is_native(config: dict[str, Any]) -> bool:
    return config.get("model_type") == FathomConfig.model_type


def native_config(config: dict[str, Any], where: str) -> FathomConfig:
    """The configuration of a FathomLM directory, checked field by field."""
    try:
        built: FathomConfig = FathomConfig.from_dict(dict(config))
        built.build_parts()
    except FathomError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: config.json is not a FathomLM configuration ({error})") from error
    return built


def load_native(
    directory: Path, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device
) -> FathomForCausalLM:
    shards = Shards(directory)
    model = empty_model(native_config(config, str(directory)))
    dtype = dtype or shards.get(f"{PREFIX}embed.weight").dtype
    model.config.dtype = dtype
    fill(model, lambda name: shards.get(PREFIX + name), dtype, device, str(directory))
    return finish(model, read_tokenizer(directory))
