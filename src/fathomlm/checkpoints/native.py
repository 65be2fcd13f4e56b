"""FathomLM directories: config.json of type `fathomlm` or `fathomlm-seq2seq`, safetensors with each weight once, tokenizer
files, read and written, whole or not at all.

Weights may be stored as int8 with one float scale for each output channel, which is how a model ships with a package. A
matrix `<name>.weight` of linears and embeddings then is int8, with `<name>.weight.scale` (float32, one number a row) beside
it: row i is scale[i] times its integers, which run from -127 to 127. Norms, biases, routers and what exits and relaxations
add are small or decide much, and stay as they are. Reading multiplies out; `model.quantize` computes in int8, and rounds
such weights to the same integers again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from fathomlm.checkpoints.assemble import empty_model, fill, finish
from fathomlm.checkpoints.huggingface import TOKENS, read_tokenizer, token_ids
from fathomlm.checkpoints.shards import SHARD_BYTES, Shards, write_shards
from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.depth import DepthPlan
from fathomlm.depth.bounds import BOUNDS
from fathomlm.errors import CheckpointError, FathomError, OptionError, choices
from fathomlm.fields import Fields
from fathomlm.kernels.quantized import dequantize_int8, quantize_int8
from fathomlm.model.encoder import build_encoder
from fathomlm.model.hub import FathomConfig, check_plain, introduce
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig

OWN_FIELDS = (
    "model_type", "architecture", "plan", "relaxation", "encoder_config", "exit_rank", "exit_adapter", "exit_classifier",
    "exit_vocab", "weight_format", "kept_layers", "initializer_range", "use_cache", *TOKENS,
)  # fmt: skip
"""What is read of a config.json; the dtype is the weights' own."""
CONFIGS: dict[str, type[FathomConfig]] = {kind.model_type: kind for kind in (FathomConfig, FathomSeq2SeqConfig)}


def is_native(config: dict[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in CONFIGS


def native_config(config: dict[str, Any], where: str) -> FathomConfig:
    """The configuration of a FathomLM directory, checked field by field."""
    try:
        built: FathomConfig = CONFIGS[config["model_type"]].from_dict(_own_fields(config, where))
        architecture, _, _ = built.build_parts()
        _ = built.exit_parts, built.build_exit_vocab()
        built.check_kept_layers()
        if built.weight_format not in (None, INT8):
            raise OptionError(choices("weight_format", str(built.weight_format), [INT8]))
        if isinstance(built, FathomSeq2SeqConfig):
            with torch.device("meta"):
                build_encoder(built.encoder_config)
        elif architecture.cross:
            raise OptionError(f"a decoder over an encoder is of model type '{FathomSeq2SeqConfig.model_type}'")
    except FathomError as error:
        raise error if str(error).startswith(where) else CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: config.json is not a FathomLM configuration ({error})") from error
    return built


def _own_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields that mean something here, of their types. Others are transformers' and not looked at: it makes a table of
    `num_labels` names, for one."""
    fields = Fields(config, f"{where}: config.json", error=CheckpointError)
    found = {name: config[name] for name in OWN_FIELDS if name in config}
    fields.record("architecture")
    for name in ("plan", "encoder_config"):
        if name in found:
            fields.record(name)
    fields.record("relaxation", default=None)
    for name in ("exit_rank", "exit_adapter"):
        fields.integer(name, at_least=0, at_most=BOUNDS["rank"][1], default=0)
    fields.number("initializer_range", at_least=0.0, default=0.02)
    for name in ("exit_classifier", "use_cache"):
        fields.flag(name, default=False)
    fields.text("weight_format", default=None)
    found |= {name: token for name, token in token_ids(fields).items() if name in found}
    return found


def load_native(directory: Path, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device) -> FathomModel:
    shards = Shards(directory)
    built = native_config(config, str(directory))
    shards.check_layers(DepthPlan.from_dict(built.plan).unique_layers)
    if isinstance(built, FathomSeq2SeqConfig):
        shards.check_layers(built.encoder_config.get("num_layers", 1))
    dtype = dtype or read_weight(shards, "decoder.embed.weight").dtype
    built.dtype, built.weight_format = dtype, None
    model = empty_model(built)
    fill(model, lambda name: read_weight(shards, name), dtype, device, str(directory))
    return finish(model, read_tokenizer(directory, config))


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
    card: str | None = None,
) -> Path:
    """`save_pretrained`, made atomic. `quantize="int8"` stores matrices as integers with a scale for each row; files are
    split at `shard_bytes`. `card` is the text of a README.md."""
    out = Path(out)
    if quantize not in (None, INT8):
        raise OptionError(choices("quantize", str(quantize), [INT8]))
    if shard_bytes < 1:
        raise OptionError(f"shard size must be >= 1 byte, got {shard_bytes}")
    check_plain(model, "saved")
    if quantize is not None and isinstance(model, FathomForSeq2SeqLM):
        raise OptionError("int8 is for decoder-only models; this is an encoder-decoder, whose encoder is transformers' own")
    check_room(out, weight_bytes(model))
    with whole_directory(out, force) as directory:
        hf_logging.disable_progress_bar()
        if quantize is not None:
            _save_int8(model, directory, shard_bytes)
        else:
            model.save_pretrained(directory, max_shard_size=shard_bytes)
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")
    return out


def _save_int8(model: FathomModel, directory: Path, shard_bytes: int) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.weight_format = INT8
    introduce(model, config, directory)
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    write_shards(directory, quantized_tensors(model), shard_bytes)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(directory)


def directory_bytes(path: Path) -> int:
    """The size on disk of a model directory's files, or of one file."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


INT8 = "int8"
"""What config.json calls it, as `weight_format`."""
SCALE = ".scale"


def quantized_names(model: FathomModel) -> set[str]:
    """The weights that are stored as int8, by their names in the file."""
    modules = model.decoder.named_modules(prefix="decoder")
    matrices = {f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)}
    whole = ("decoder.routers.", "decoder.exit_blocks.", "decoder.exit_draft.")
    return {name for name in matrices if not name.startswith(whole)}


def quantized_tensors(model: FathomModel) -> Iterator[tuple[str, Tensor]]:
    """What the files of a model hold: each weight once, a matrix with its scale behind it."""
    chosen = quantized_names(model)
    for name, parameter in model.named_parameters():
        if name not in chosen:
            yield name, parameter
            continue
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"'{name}' holds numbers that are not finite; int8 has no place for them")
        whole, scale = quantize_int8(parameter)
        yield name, whole
        yield name + SCALE, scale


def read_weight(shards: Shards, name: str) -> Tensor:
    """A weight as it is stored, or multiplied out in float32 where that is int8."""
    weight = shards.get(name)
    if weight.dtype != torch.int8:
        return weight
    scale = shards.get(name + SCALE)
    where = f"{shards.directory}: '{name + SCALE}'"
    if weight.dim() != 2 or tuple(scale.shape) != (weight.shape[0],):
        raise CheckpointError(
            f"{where} is {tuple(scale.shape)}; '{name}' is {tuple(weight.shape)} and requires one scale for each of its rows"
        )
    if not scale.is_floating_point() or not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{where} must hold finite numbers above 0")
    return dequantize_int8(weight, scale)
