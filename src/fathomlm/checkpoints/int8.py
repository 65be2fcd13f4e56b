"""Weights as int8 with one float scale for each output channel: what a model that ships with a package is stored in.

A matrix `<name>.weight` of linears and embeddings is stored as int8, with `<name>.weight.scale` (float32, one number a row)
beside it: row i is scale[i] times its integers, which run from -127 to 127. Norms, biases, routers and what exits and
relaxations add are small or decide much, and stay as they are. Reading multiplies out; `model.quantize` computes
in int8, and rounds such weights to the same integers again.

Shapes: O output channels (rows), I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fathomlm.checkpoints.shards import Shards
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.kernels.quantized import dequantize_int8, quantize_int8
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

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


def check_int8(model: FathomModel) -> None:
    """Refuse what this format does not hold, and what cannot be computed with such weights."""
    if isinstance(model, FathomForSeq2SeqLM):
        raise OptionError("int8 is for decoder-only models; this is an encoder-decoder, whose encoder is transformers' own")


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
