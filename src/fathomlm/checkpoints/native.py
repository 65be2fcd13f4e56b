"""FathomLM directories: config.json of type `fathomlm` or `fathomlm-seq2seq`, safetensors with each weight once, tokenizer
files. Weights that are stored as int8 (checkpoints/int8.py) are multiplied out as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.assemble import fill, finish
from fathomlm.checkpoints.huggingface import read_tokenizer
from fathomlm.checkpoints.int8 import INT8, read_weight
from fathomlm.checkpoints.shards import Shards
from fathomlm.errors import CheckpointError, FathomError, OptionError, choices
from fathomlm.model.encoder import build_encoder
from fathomlm.model.hub import FathomConfig, empty_model
from fathomlm.model.seq2seq import FathomModel, FathomSeq2SeqConfig, empty_seq2seq

PREFIX = "decoder."
ENCODER_PREFIX = "encoder."
CONFIGS: dict[str, type[FathomConfig]] = {kind.model_type: kind for kind in (FathomConfig, FathomSeq2SeqConfig)}


def is_native(config: dict[str, Any]) -> bool:
    return config.get("model_type") in CONFIGS


def native_config(config: dict[str, Any], where: str) -> FathomConfig:
    """The configuration of a FathomLM directory, checked field by field."""
    try:
        built: FathomConfig = CONFIGS[config["model_type"]].from_dict(dict(config))
        architecture, _, _ = built.build_parts()
        _ = built.exit_parts, built.build_words()
        if built.weight_format not in (None, INT8):
            raise OptionError(choices("weight_format", str(built.weight_format), [INT8]))
        if isinstance(built, FathomSeq2SeqConfig):
            with torch.device("meta"):
                build_encoder(built.encoder_config)
        elif architecture.cross:
            raise OptionError(f"a decoder over an encoder is of model type '{FathomSeq2SeqConfig.model_type}'")
    except FathomError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: config.json is not a FathomLM configuration ({error})") from error
    return built


def load_native(directory: Path, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device) -> FathomModel:
    shards = Shards(directory)
    built = native_config(config, str(directory))
    dtype = dtype or read_weight(shards, f"{PREFIX}embed.weight").dtype
    built.dtype, built.weight_format = dtype, None
    where = str(directory)
    if isinstance(built, FathomSeq2SeqConfig):
        both = empty_seq2seq(built)
        fill(both.decoder, lambda name: read_weight(shards, PREFIX + name), dtype, device, where)
        fill(both.encoder, lambda name: shards.get(ENCODER_PREFIX + name), dtype, device, where)
        return finish(both, read_tokenizer(directory))
    model = empty_model(built)
    fill(model.decoder, lambda name: read_weight(shards, PREFIX + name), dtype, device, where)
    return finish(model, read_tokenizer(directory))
