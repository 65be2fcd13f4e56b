"""Export: a Hugging Face checkpoint, which transformers, vLLM and llama.cpp's converter read.

Unrolled, each step becomes a layer of its own with what the step adds merged in, so the file is as large as the untied
model; what it computes is what the recursive model computes. In a format that has loops (`loops`) the shared layers are
written once. Early exits have no place in either and are left out: what is written is the last output's model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fathomlm.checkpoints.assemble import OnProgress, telling
from fathomlm.checkpoints.families import FAMILIES, family_for, hf_name
from fathomlm.checkpoints.families.shared import Fusion
from fathomlm.checkpoints.resolve import dtype_name
from fathomlm.checkpoints.shards import SHARD_BYTES, write_shards
from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.depth import Architecture, DepthPlan, Step
from fathomlm.depth.cost import parameter_shapes
from fathomlm.errors import OptionError, choices
from fathomlm.fields import Fields
from fathomlm.model.hub import FathomForCausalLM, check_plain
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel


def export(
    model: FathomModel,
    out: str | Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_layer: OnProgress | None = None,
    loops: str | None = None,
) -> Path:
    """Write `model` into the directory `out`, and return it: unrolled, or with its loops in the format of the family
    `loops`, such as nanbeige. A model of a family with loops keeps them."""
    out = Path(out)
    loops = loops or format_with_loops(model)
    check_exports(model)
    if loops is not None:
        written = check_loops(model, loops)
        plan = model.plan
        config, dtype = _config(model, written, plan), model.decoder.embed.weight.dtype
        size = dtype.itemsize * sum(math.prod(shape) for shape in parameter_shapes(written, plan).values())
        return _write(model, out, config, size, stored_layers(plan), force, shard_bytes, on_layer)
    if model.plan.loop_norm:
        raise OptionError("a plain checkpoint cannot hold a norm between loops; --format nanbeige and --format gguf can")
    unrolled = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    encoder = [] if isinstance(model, FathomForCausalLM) else list(model.encoder.parameters())
    _check_one_shape(model)
    stored = sum(math.prod(shape) for shape in parameter_shapes(unrolled).values())
    size = stored * model.decoder.embed.weight.element_size() + sum(p.numel() * p.element_size() for p in encoder)
    return _write(model, out, _config(model, unrolled), size, model.plan.steps, force, shard_bytes, on_layer)


def format_with_loops(model: FathomModel) -> str | None:
    """The family that a looped model is of, where its format has loops."""
    looped = not model.plan.plain and family_for(model.architecture).write_loops is not None
    return model.architecture.family if looped else None


def stored_layers(plan: DepthPlan) -> tuple[Step, ...]:
    """The steps whose layers a format with loops stores: the first use of each."""
    return tuple(plan.uses(layer)[0] for layer in range(plan.unique_layers))


def check_loops(model: FathomModel, family: str) -> Architecture:
    """The architecture that `family`'s format would say of a looped model; an error where it has no place for it."""
    if family not in FAMILIES or FAMILIES[family].write_loops is None:
        raise OptionError(choices("format with loops", family, [name for name, one in FAMILIES.items() if one.write_loops]))
    if FAMILIES[family].injection != model.plan.injection:
        wants = "requires" if FAMILIES[family].injection else "cannot hold"
        raise OptionError(f"the {family} format {wants} an injection at the beginning of each loop")
    if model.plan.sharing != "cycle" and not model.plan.injection:
        raise OptionError(f"the {family} format loops all layers (cycle); this model is {model.plan.sharing}")
    if model.relaxation is not None:
        raise OptionError(f"the {family} format cannot hold a {model.relaxation.kind} relaxation; unrolled it is merged")
    gated = model.plan.exit_gate and model.plan.loop_norm and model.plan.exits == model.plan.recursion_ends()
    if FAMILIES[family].exit_gate and not gated:
        raise OptionError(f"the {family} format requires an exit after each loop, a gate and a norm between loops")
    unrolled = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    other = differing_traits(unrolled, family)
    if other:
        raise OptionError(f"the {family} format cannot hold {', '.join(other)} of a {model.architecture.family} model")
    return dataclasses.replace(unrolled, family=family)


def differing_traits(architecture: Architecture, family: str) -> list[str]:
    """What a family's configuration loses of an architecture, by the names of its fields."""
    as_family = dataclasses.replace(architecture, family=family)
    where = FAMILIES[family]
    config = Fields({"model_type": where.model_type, **where.write(as_family)}, "config", error=OptionError)
    back = where.read(config)
    return [f.name for f in dataclasses.fields(back) if getattr(back, f.name) != getattr(as_family, f.name)]


def check_exports(model: FathomModel) -> None:
    """Refuse what no other format than ours has a place for."""
    check_plain(model, "exported")
    if model.relaxation is not None and not model.relaxation.method.exports:
        raise OptionError(f"other formats cannot hold a {model.relaxation.kind} relaxation")
    if model.plan.routing is not None or model.plan.kv != "cache":
        what = "a router" if model.plan.routing is not None else "shared keys and values"
        raise OptionError(
            f"other formats cannot hold {what}: there every token would run every layer with entries of its own, "
            "which is another model"
        )


def _write(
    model: FathomModel, out: Path, config: dict[str, Any], size: int, steps: Sequence[Step], force: bool, shard_bytes: int,
    on_layer: OnProgress | None,
) -> Path:  # fmt: skip
    check_room(out, size)
    with whole_directory(out, force) as directory:
        write_shards(directory, _tensors(model, steps, on_layer), shard_bytes)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _generation_config(model).save_pretrained(directory)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(directory)
    return out


def describe_exits(model: FathomModel) -> str:
    """The exits of a model and what they have of their own, or its draft layer, which an export leaves out."""
    if model.plan.draft:
        return "the draft layer"
    kinds = {"heads": model.decoder.exit_heads, "layers": model.decoder.exit_blocks}
    kinds |= {"adapters": model.decoder.exit_adapters, "classifiers": model.decoder.exit_classifiers}
    own = [kind for kind, found in kinds.items() if len(found)] + ["gate"] * (model.decoder.exit_gate is not None)
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


def _config(model: FathomModel, written: Architecture, plan: DepthPlan | None = None) -> dict[str, Any]:
    """`plan` is written where the format has loops."""
    family = family_for(written)
    fields = family.write(written) if plan is None or family.write_loops is None else family.write_loops(written, plan)
    ids = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if isinstance(model, FathomForSeq2SeqLM):
        ids["decoder_start_token_id"] = model.config.decoder_start_token_id
    encoder = model.config.encoder_config if isinstance(model, FathomForSeq2SeqLM) else {}
    return {
        **encoder,
        "architectures": [family.architecture_class],
        "model_type": family.model_type,
        **fields,
        **ids,
        "dtype": dtype_name(model),
    }


@torch.no_grad()
def _tensors(model: FathomModel, steps: Sequence[Step], on_layer: OnProgress | None) -> Iterator[tuple[str, Tensor]]:
    """Tensors by Hugging Face's names, a layer for each of `steps`, in order, each made when it is asked for."""
    decoder, plan = model.decoder, model.plan
    family = family_for(model.architecture, plan if len(steps) == plan.unique_layers else None)
    yield hf_name(family, "embed.weight"), decoder.embed.weight
    if isinstance(model, FathomForSeq2SeqLM):
        yield from ((f"encoder.{name}", parameter) for name, parameter in model.encoder.named_parameters())
    if decoder.relative is not None:
        yield hf_name(family, "relative.weight"), decoder.relative.weight
    for number, step in enumerate(telling(steps, on_layer)):
        merged = {
            name: family.sorted_rows(name.rpartition(".")[0], tensor, model.architecture.head_dim, back=True)
            for name, tensor in merged_layer(model, step).items()
        }
        for fusion in family.fusions:
            merged = _fuse(merged, fusion, model.architecture.heads)
        for name, tensor in merged.items():
            where = hf_name(family, f"layers.{number}.{name}")
            if "*" in where:
                yield from ((where.replace("*", str(i)), expert) for i, expert in enumerate(tensor))
            else:
                yield where, tensor
    for name, parameter in decoder.norm.named_parameters():
        yield hf_name(family, f"norm.{name}"), parameter
    if decoder.inject is not None:
        yield hf_name(family, "inject.weight"), decoder.inject.weight
    if decoder.exit_gate is not None and family.exit_gate:
        for name, parameter in decoder.exit_gate.named_parameters():
            yield hf_name(family, f"exit_gate.{name}"), parameter
    if decoder.head is not None:
        yield hf_name(family, "head.weight"), decoder.head.weight
    elif model.architecture.cross and model.architecture.head_scale == 1.0:
        # transformers before version 5 takes an unscaled T5 to have a head of its own.
        yield hf_name(family, "head.weight"), decoder.embed.weight


def merged_layer(model: FathomModel, step: Step) -> dict[str, Tensor]:
    """A step's tensors by our names within a layer, with what it adds merged in."""
    layer, delta = model.decoder.layers[step.layer], model.decoder.delta(step)
    tensors: dict[str, Tensor] = {name: layer.get_parameter(name) for name in model.architecture.layer_shapes()}
    if delta is None:
        return tensors
    return {name: delta.merged(name, tensor).to(tensor.dtype) for name, tensor in tensors.items()}


def _fuse(tensors: dict[str, Tensor], fusion: Fusion, heads: int) -> dict[str, Tensor]:
    """Matrices that a format keeps as one, joined."""
    taken = {f"{part}.{end}" for part in fusion.parts for end in ("weight", "bias") if fusion.end in (None, end)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in taken}
    for end in ("weight", "bias") if fusion.end is None else (fusion.end,):
        if f"{fusion.parts[0]}.{end}" in tensors:
            rest[f"{fusion.name}.{end}"] = fusion.join([tensors[f"{part}.{end}"] for part in fusion.parts], heads)
    return rest
