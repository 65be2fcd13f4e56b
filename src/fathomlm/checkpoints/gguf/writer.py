"""GGUF out, for llama.cpp and what is built on it: the reader's names, layouts and metadata the other way round.

A `cycle` plan over Llama-like layers is written tied, as llama.cpp's `nanbeige` architecture: shared layers once, and how
often they run. Any other plan is unrolled. What is written is read back before it takes its place, so that a model which
GGUF cannot describe is an error here and not a wrong model there.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from fathomlm.checkpoints.assemble import OnProgress, end_ids, telling
from fathomlm.checkpoints.export import check_exports, check_loops, merged_layer, stored_layers
from fathomlm.checkpoints.gguf import INTERLEAVED, stored_name
from fathomlm.checkpoints.gguf.architecture import SIZES, divisors_llama3, read_architecture
from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.checkpoints.gguf.tokenizer import tokenizer_metadata
from fathomlm.checkpoints.writing import check_room, whole_file
from fathomlm.depth import Architecture, DepthPlan, Step
from fathomlm.errors import OptionError, UnsupportedModel, choices
from fathomlm.model.hub import FathomForCausalLM

NAMES = {
    "llama": "llama", "mistral": "llama", "nanbeige": "nanbeige", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma3": "gemma3", "neox": "gptneox", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""llama.cpp's name of each family."""
KINDS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""How matrices may be stored: what the gguf package packs."""
PACKED = tuple(kind for kind in KINDS if kind.startswith("q"))
"""Those that pack blocks of a row's numbers."""
FINER = {"q5_1": "q8_0", "q5_0": "q8_0", "q4_1": "q8_0", "q4_0": "q8_0"}
"""How embedding and head are stored beside such matrices: they suffer most from few bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenGGUF:
    """What an export wrote."""

    path: Path
    architecture: str
    """By llama.cpp's name."""
    layers: int
    loops: int
    unpacked: dict[str, int]
    """Matrices whose rows fill no blocks of the format and that are stored in 16 bits instead, with the length of a row; by
    their name in a layer."""


def export_gguf(
    model: FathomForCausalLM,
    out: str | Path,
    kind: str = "f16",
    *,
    unroll: bool = False,
    on_layer: OnProgress | None = None,
) -> WrittenGGUF:
    """Write `model` as one GGUF file, its matrices stored as `kind`. `unroll` writes a layer for each step
    where loops could be kept."""
    out = Path(out)
    if kind not in KINDS:
        raise OptionError(choices("weight format", kind, KINDS))
    check_exports(model)
    written, plan = _layout(model, unroll)
    steps = model.plan.steps if plan.recursions == 1 else stored_layers(plan)
    if (name := NAMES.get(written.family)) is None:
        raise OptionError(f"GGUF export supports {', '.join(NAMES)}, not {written.family}")
    facts = {**_metadata(written, plan, name), **_tokenizer(model, written)}
    facts["general.file_type"] = int(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    tensors = list(_shapes(model, written, steps))
    check_room(out, sum(_bytes(shape, _kind(name, shape, kind)) for name, shape in tensors))
    with whole_file(out) as temporary:
        _write(temporary, name, facts, model, written, steps, kind, on_layer)
        _check(temporary, written, plan)
    unpacked = {re.sub(r"^blk\.\d+\.", "", each): shape[-1] for each, shape in tensors if _is_unpacked(each, shape, kind)}
    return WrittenGGUF(path=out, architecture=name, layers=len(steps), loops=plan.recursions, unpacked=unpacked)


def _layout(model: FathomForCausalLM, unroll: bool) -> tuple[Architecture, DepthPlan]:
    """What the file will say: the looped model itself where GGUF has loops for it, or its unrolled twin."""
    plan = model.plan
    if plan.injection:
        raise OptionError("a GGUF file cannot hold an injection at the beginning of each loop; --format hf can")
    if plan.recursions > 1 and not unroll:
        try:
            shape = check_loops(model, "nanbeige")  # first: a plan with ends of its own may not divide as a cycle
            looped = DepthPlan.build("cycle", plan.recursions, plan.unrolled_layers)
            return shape, looped.with_loop_norm() if plan.loop_norm else looped
        except OptionError:
            if plan.loop_norm:
                raise
    if plan.loop_norm:
        raise OptionError("an unrolled GGUF file cannot hold a norm between loops; leave --unroll out")
    unrolled = model.architecture.with_layers(tuple(step.origin for step in plan))
    family = "llama" if unrolled.family == "nanbeige" else unrolled.family
    return dataclasses.replace(unrolled, family=family), DepthPlan.vanilla(unrolled.layers)


def _metadata(a: Architecture, plan: DepthPlan, name: str) -> dict[str, Any]:
    norm = "layer_norm_epsilon" if a.norm == "layer" else "layer_norm_rms_epsilon"
    facts: dict[str, Any] = {
        "general.type": "model",
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **{f"{name}.{key}": getattr(a, field) for field, key in SIZES.items()},
        f"{name}.{SIZES['layers']}": plan.unique_layers,
        f"{name}.attention.value_length": a.head_dim,
        f"{name}.attention.{norm}": float(a.norm_eps),
        f"{name}.rope.dimension_count": a.rotary_dim,
        f"{name}.rope.freq_base": float(a.rope.theta),
        f"{name}.vocab_size": a.vocab,
    }
    if a.rope.scaling == "linear":
        facts |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": float(a.rope.factor)}
    if a.attention_scale is not None and a.family != "gemma3":
        facts[f"{name}.attention.scale"] = float(a.attention_scale)
    if name == "granite":
        facts |= {"granite.embedding_scale": a.embedding_scale, "granite.residual_scale": a.residual_scale}
        facts["granite.logit_scale"] = 1 / a.head_scale
    if a.experts:
        facts |= {f"{name}.expert_count": a.experts, f"{name}.expert_used_count": a.experts_per_token}
        facts[f"{name}.expert_feed_forward_length"] = a.intermediate
    if name == "gptneox":
        facts["gptneox.use_parallel_residual"] = a.residual == "parallel"
    if name == "gemma3":
        facts["gemma3.attention.sliding_window"] = max((w for w in a.windows if w is not None), default=a.context)
        facts["gemma3.rope.freq_base_swa"] = float((a.local_rope or a.rope).theta)
    if name == "nanbeige":
        facts |= {"nanbeige.num_loops": plan.recursions, "nanbeige.skip_loop_final_norm": not plan.loop_norm}
    return facts


def _tokenizer(model: FathomForCausalLM, a: Architecture) -> dict[str, Any]:
    if model.tokenizer is None:
        raise OptionError("the model has no tokenizer, and llama.cpp runs no GGUF file without one")
    ends = end_ids(model.config.eos_token_id)
    return tokenizer_metadata(model.tokenizer, a, ends)


def _tensors(
    model: FathomForCausalLM, a: Architecture, steps: Sequence[Step], on_layer: OnProgress | None
) -> Iterator[tuple[str, Tensor]]:
    """By GGUF's names, each made when its turn comes."""
    decoder = model.decoder
    yield "token_embd.weight", decoder.embed.weight
    for name, parameter in decoder.norm.named_parameters():
        yield f"output_norm.{name}", _norm(parameter, a)
    if decoder.head is not None:
        yield "output.weight", decoder.head.weight
    if a.rope.scaling == "llama3":
        yield "rope_freqs.weight", divisors_llama3(a.rope, a.rotary_dim)
    for number, step in enumerate(telling(steps, on_layer)):
        tensors = merged_layer(model, step)
        for name in tensors:
            stored, part = stored_name(f"layers.{number}.{name}", a)
            if part in (None, 0):
                yield stored, _stored(name, tensors, a)


def _shapes(model: FathomForCausalLM, a: Architecture, steps: Sequence[Step]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same tensors' shapes, without making them."""
    yield from ((name, tuple(tensor.shape)) for name, tensor in _tensors(model, a, (), None))
    for number in range(len(steps)):
        for name, shape in a.layer_shapes().items():
            stored, part = stored_name(f"layers.{number}.{name}", a)
            if part in (None, 0):
                yield stored, shape if part is None else (3 * shape[0], *shape[1:])


def _stored(name: str, tensors: dict[str, Tensor], a: Architecture) -> Tensor:
    """One tensor of a layer as llama.cpp keeps it."""
    tensor = tensors[name]
    if a.family == "neox" and name.startswith("attn.q."):
        return torch.cat([tensors[name.replace("attn.q.", f"attn.{which}.")] for which in "qkv"])
    if a.family in INTERLEAVED and name.startswith(("attn.q.", "attn.k.")):
        heads = a.heads if name.startswith("attn.q.") else a.kv_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return _norm(tensor, a) if "norm" in name else tensor


def _norm(tensor: Tensor, a: Architecture) -> Tensor:
    return tensor.float() + 1 if a.norm == "rms_plus_one" else tensor


def _kind(name: str, shape: Sequence[int], kind: str) -> Any:
    """How a tensor is stored: vectors as they are, matrices packed where their rows fill blocks."""
    if len(shape) == 1 or ".ffn_gate_inp." in name:  # what chooses experts is small, and a wrong choice is a large error
        return gguf.GGMLQuantizationType.F32
    if name in ("token_embd.weight", "output.weight"):
        kind = FINER.get(kind, kind)
    packed = gguf.GGMLQuantizationType[kind.upper()]
    return packed if shape[-1] % gguf.GGML_QUANT_SIZES[packed][0] == 0 else gguf.GGMLQuantizationType.F16


def _is_unpacked(name: str, shape: Sequence[int], kind: str) -> bool:
    """Whether a tensor would be stored in fewer bits if its rows filled blocks."""
    return kind in PACKED and _kind(name, shape, kind) == gguf.GGMLQuantizationType.F16


def _bytes(shape: Sequence[int], stored: Any) -> int:
    return math.prod(gguf.quant_shape_to_byte_shape(shape, stored))


@torch.no_grad()
def _write(
    path: Path, name: str, facts: dict[str, Any], model: FathomForCausalLM, a: Architecture, steps: Sequence[Step],
    kind: str, on_layer: OnProgress | None,
) -> None:  # fmt: skip
    """A tensor at a time: the table of all tensors first, then what is in them."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in facts.items():
        add_value(writer, key, value)
    for tensor_name, shape in _shapes(model, a, steps):
        stored = _kind(tensor_name, shape, kind)
        bytes_shape = gguf.quant_shape_to_byte_shape(shape, stored)
        writer.add_tensor_info(tensor_name, bytes_shape, np.dtype(np.uint8), _bytes(shape, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor_name, tensor in _tensors(model, a, steps, on_layer):
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        packed = gguf.quants.quantize(values, _kind(tensor_name, values.shape, kind))
        writer.write_tensor_data(packed.view(np.uint8))
    writer.close()


def _check(path: Path, written: Architecture, plan: DepthPlan) -> None:
    """Refuse a file that would be read as another model."""
    try:
        found, found_plan = read_architecture(GGUFFile(path))
    except UnsupportedModel as error:
        why = str(error).removeprefix(f"{path}: ")
        raise OptionError(f"GGUF cannot hold this {written.family} model ({why})") from error
    wanted = dataclasses.replace(written, family=found.family)
    differ = [f.name for f in dataclasses.fields(wanted) if not _alike(getattr(wanted, f.name), getattr(found, f.name))]
    if differ or found_plan != plan:
        what = ", ".join(differ) or "its plan"
        raise OptionError(f"GGUF cannot hold {what} of this {written.family} model")


def _alike(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=1e-6)
    if dataclasses.is_dataclass(wanted) and dataclasses.is_dataclass(found):
        return all(_alike(getattr(wanted, f.name), getattr(found, f.name)) for f in dataclasses.fields(wanted))
    return bool(wanted == found)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One value of the metadata, as the type that readers expect."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
