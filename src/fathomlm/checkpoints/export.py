"""Unrolled export: a plain Hugging Face checkpoint, which transformers, vLLM and llama.cpp's converter read.

Each step becomes a layer of its own with what the step adds merged in, so the file is as large as the untied model; what
it computes is what the recursive model computes. Early exits have no place in it and are left out: what is written is the
last output's model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fathomlm.checkpoints.assemble import OnProgress
from fathomlm.checkpoints.families import family_for, hf_name
from fathomlm.checkpoints.huggingface import fuse_qkv
from fathomlm.checkpoints.resolve import dtype_name
from fathomlm.checkpoints.shards import SHARD_BYTES, write_shards
from fathomlm.checkpoints.source import layer_parameter_shapes
from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.depth import Architecture, DepthPlan, Step
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel


def export(
    model: FathomModel,
    out: str | Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_layer: OnProgress | None = None,
) -> Path:
    """Write `model` unrolled into the directory `out`, and return it."""
    out = Path(out)
    if model.relaxation is not None and not model.relaxation.method.exports:
        raise OptionError(f"a plain checkpoint cannot hold a {model.relaxation.kind} relaxation")
    if model.plan.routing is not None or model.plan.kv != "cache":
        what = "a router" if model.plan.routing is not None else "shared keys and values"
        raise OptionError(
            f"a plain checkpoint cannot hold {what}: unrolled, every token would run every layer with entries of its "
            "own, which is another model"
        )
    unrolled = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    dtype = model.decoder.embed.weight.dtype
    encoder = [] if isinstance(model, FathomForCausalLM) else list(model.encoder.parameters())
    _check_one_shape(model)
    check_room(out, _bytes(unrolled, dtype) + sum(p.numel() * p.element_size() for p in encoder))
    with whole_directory(out, force) as directory:
        write_shards(directory, _tensors(model, on_layer), shard_bytes)
        config = _config(model, unrolled)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _generation_config(model).save_pretrained(directory)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(directory)
    return out


def describe_exits(model: FathomModel) -> str:
    """The exits of a model and what they have of their own, which an export leaves out."""
    kinds = {"heads": model.decoder.exit_heads, "layers": model.decoder.exit_blocks}
    kinds |= {"adapters": model.decoder.exit_adapters, "classifiers": model.decoder.exit_classifiers}
    own = [kind for kind, found in kinds.items() if len(found)]
    after = ", ".join(str(index + 1) for index in model.plan.exits)
    return f"the exits after {after}" + (f" with their {', '.join(own)}" if own else "")


def _check_one_shape(model: FathomModel) -> None:
    """T5's configuration has one shape for both halves; a decoder that was built apart may have another."""
    if isinstance(model, FathomForCausalLM):
        return
    a, encoder = model.architecture, model.config.encoder_config
    mine = {"d_ff": a.intermediate, "num_heads": a.heads, "d_kv": a.head_dim, "layer_norm_epsilon": a.norm_eps}
    mine["relative_attention_num_buckets"] = a.relative_buckets
    mine["relative_attention_max_distance"] = a.relative_distance
    for name in (name for name, value in mine.items() if encoder[name] != value):
        raise OptionError(f"a plain checkpoint has one {name}; the decoder has {mine[name]}, the encoder {encoder[name]}")


def _generation_config(model: FathomModel) -> GenerationConfig:
    if isinstance(model, FathomForCausalLM):
        return model.generation_config
    ids = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(model.config, name) for name in ids})


def _config(model: FathomModel, unrolled: Architecture) -> dict[str, Any]:
    family = family_for(unrolled)
    ids = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if isinstance(model, FathomForSeq2SeqLM):
        ids["decoder_start_token_id"] = model.config.decoder_start_token_id
    encoder = model.config.encoder_config if isinstance(model, FathomForSeq2SeqLM) else {}
    return {
        **encoder,
        "architectures": [family.architecture_class],
        "model_type": family.model_type,
        **family.write(unrolled),
        **ids,
        "dtype": dtype_name(model),
    }


@torch.no_grad()
def _tensors(model: FathomModel, on_layer: OnProgress | None) -> Iterator[tuple[str, Tensor]]:
    """The plain model's tensors by Hugging Face's names, in order, each made when it is asked for."""
    family = family_for(model.architecture)
    decoder = model.decoder
    plan: DepthPlan = decoder.plan
    yield hf_name(family, "embed.weight"), decoder.embed.weight
    if isinstance(model, FathomForSeq2SeqLM):
        yield from ((f"encoder.{name}", parameter) for name, parameter in model.encoder.named_parameters())
    if decoder.relative is not None:
        yield hf_name(family, "relative.weight"), decoder.relative.weight
    for step in plan:
        if on_layer is not None:
            on_layer(step.index, plan.unrolled_layers)
        merged = _merged_layer(model, step)
        if family.fused_qkv:
            merged = _fuse(merged, model.architecture.heads)
        for name, tensor in merged.items():
            yield hf_name(family, f"layers.{step.index}.{name}"), tensor
    for name, parameter in decoder.norm.named_parameters():
        yield hf_name(family, f"norm.{name}"), parameter
    if decoder.head is not None:
        yield hf_name(family, "head.weight"), decoder.head.weight
    elif model.architecture.cross and model.architecture.head_scale == 1.0:
        # transformers before version 5 takes an unscaled T5 to have a head of its own.
        yield hf_name(family, "head.weight"), decoder.embed.weight
    if on_layer is not None:
        on_layer(plan.unrolled_layers, plan.unrolled_layers)


def _merged_layer(model: FathomModel, step: Step) -> dict[str, Tensor]:
    layer, delta = model.decoder.layers[step.layer], model.decoder.delta(step)
    tensors: dict[str, Tensor] = {name: layer.get_parameter(name) for name in layer_parameter_shapes(model.architecture)}
    if delta is None:
        return tensors
    return {name: delta.merged(name, tensor).to(tensor.dtype) for name, tensor in tensors.items()}


def _fuse(tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """GPT-NeoX: q, k and v back into one matrix."""
    rest = {name: tensor for name, tensor in tensors.items() if name.split(".")[-2] not in ("q", "k", "v")}
    for end in ("weight", "bias"):
        if f"attn.q.{end}" in tensors:
            rest[f"attn.qkv.{end}"] = fuse_qkv(heads, *(tensors[f"attn.{which}.{end}"] for which in "qkv"))
    return rest


def _bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    parameters = architecture.layers * architecture.layer_parameters + architecture.embedding_parameters
    return (parameters + architecture.norm_parameters + architecture.relative_parameters) * dtype.itemsize
