"""From what a user types to a model: a path (Hugging Face or FathomLM directory, GGUF file), a packaged model, a preset, a
hub id."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch

from fathomlm.checkpoints.assemble import BaseCheckpoint, ModelBase, load_base, with_loops
from fathomlm.checkpoints.exit_pack import ExitPack, attach, read_pack
from fathomlm.checkpoints.fetch import cache_home
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.checkpoints.huggingface import (
    HuggingFaceCheckpoint,
    Seq2SeqCheckpoint,
    is_seq2seq,
    plan_from_config,
    read_config,
    seq2seq_architecture,
)
from fathomlm.checkpoints.locate import locate, named_preset
from fathomlm.checkpoints.native import is_native, load_native, native_config
from fathomlm.depth import Architecture, DepthPlan, ExitParts, Relaxation
from fathomlm.errors import CheckpointError, OptionError, OutputError, choices
from fathomlm.jsonfile import read_object
from fathomlm.kernels.cpu_library import COMPILERS, build_library
from fathomlm.kernels.paged_write import check_float8
from fathomlm.kernels.quantized import GPU_KINDS, KINDS, Kind
from fathomlm.model.encoder import encoder_beside, encoder_record
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig

GENERATION = "generation_config.json"
SAMPLED = ("temperature", "top_p", "min_p", "repetition_penalty")
"""What a generation config says of sampling in numbers with a fraction."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    *,
    exits: str | Path | None = None,
    any_base: bool = False,
    quantize: str | None = None,
    loops: int | None = None,
) -> FathomModel:
    """A model from any source, ready to run, with its tokenizer as `model.tokenizer`.

    `dtype` defaults to what the weights are stored in (float32 for int8 and for quantised GGUF files). A T5, mT5
    or LongT5 comes as a `FathomForSeq2SeqLM`, everything else as a `FathomForCausalLM`. `exits` is an exit pack to put on
    it (`fathomlm export --format exits`), refused where it was trained over another model, unless `any_base`.
    `quantize` computes with weights of fewer bits, "int8" or "int4" on the CPU, "int8" or "fp8" on a GPU; such a model
    decodes and cannot be saved. `loops` is how often a looped model runs its core, where that is not as often as its
    configuration says.
    """
    place, kind = parse_device(device), parse_dtype(dtype)
    if quantize is not None:
        kind = check_quantize(quantize, kind, place)
    pack = None if exits is None else read_pack(exits)
    model = _load(source, kind, place, pack)
    model = model if loops is None else with_loops(model, loops)
    model = model if pack is None else attach(model, pack, any_base=any_base)
    if quantize is not None:
        quantize_model(model, quantize)
    return model


def check_quantize(quantize: str, dtype: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """Refuse what cannot be quantized before anything is read; the dtype to load in."""
    if quantize not in (known := {*KINDS, *GPU_KINDS}):
        raise OptionError(choices("quantize", quantize, known))
    if quantize not in {"cpu": KINDS, "cuda": GPU_KINDS}.get(device.type, ()):
        allowed = f"{' or '.join(KINDS)} on the CPU, {' or '.join(GPU_KINDS)} on a GPU"
        raise OptionError(f"quantize {quantize} cannot be combined with device '{device}'; use {allowed}")
    if quantize == "fp8":
        check_float8(device, "quantize fp8")
    if device.type == "cpu" and dtype not in (None, torch.float32):
        name = str(dtype).removeprefix("torch.")
        raise OptionError(f"quantize {quantize} computes in float32 on the CPU; it cannot be combined with dtype '{name}'")
    return torch.float32 if device.type == "cpu" else dtype


def quantize_model(model: FathomModel, kind: str) -> None:
    """Replace a loaded model's matrices by integers, in place. Where the kernels for a CPU cannot be compiled or kept it
    stays as it is, and says so."""
    decoder = decoder_only(model, f"quantize {kind}").decoder
    if decoder.embed.weight.device.type != "cpu":
        quantize_layers(decoder, cast(Kind, kind), None)
        return
    why = f"quantize {kind} requires a C compiler ({', '.join(COMPILERS)})"
    try:
        library = build_library(cache_home() / "kernels")
    except OutputError as error:
        library, why = None, str(error)
    if library is None:
        logging.getLogger("fathomlm").warning("fathomlm: %s; computing in float32", why)
    else:
        quantize_layers(decoder, cast(Kind, kind), library)


def _load(source: str | Path, dtype: torch.dtype | None, device: torch.device, pack: ExitPack | None) -> FathomModel:
    """The model as it is stored. A pack that does not fit is refused before any weight is read."""
    path = locate(source)
    config = read_config(path) if path.is_dir() else {}
    if is_native(config):
        if pack is not None:
            pack.plan_over(*native_config(config, str(path)).build_parts())
        return with_sampling(load_native(path, config, dtype, device), path)
    base = open_base(path, config)
    if pack is not None:
        pack.plan_over(base.architecture, base.plan, None)
    return with_sampling(load_base(base, dtype, device, str(source)), path)


def with_sampling(model: FathomModel, path: Path) -> FathomModel:
    """The model, with what the file beside its weights says of sampling in `model.generation_config`, so that it is saved
    with it. Without `do_sample` such a file means greedy decoding, and what else it says nothing. Here are types alone:
    bounds are `Sampling`'s, when the values are used."""
    file = path / GENERATION
    if not file.is_file() or isinstance(model, FathomForSeq2SeqLM):  # which has no generation_config
        return model
    fields = read_object(file, error=CheckpointError)
    if fields.flag("do_sample", default=False):
        found = {name: fields.number(name, default=None) for name in SAMPLED}
        model.generation_config.update(do_sample=True, top_k=fields.integer("top_k", default=None), **found)
    return model


def sampling_defaults(model: FathomModel) -> dict[str, float]:
    """How a checkpoint wants its tokens sampled, by the names of `Sampling`'s fields; none where it does not say that it
    samples. The command line keeps its own defaults, greedy; a server takes these where a request names none, as vLLM
    does."""
    if isinstance(model, FathomForSeq2SeqLM):
        return {}
    config = model.generation_config
    values = {name: getattr(config, name, None) for name in (*SAMPLED, "top_k")} if config.do_sample else {}
    return {name: value for name, value in values.items() if value is not None}


def decoder_only(model: FathomModel, what: str) -> FathomForCausalLM:
    """The model, where it has no encoder; `what` is what cannot be done with one that has."""
    if isinstance(model, FathomForSeq2SeqLM):
        raise OptionError(f"{what} takes decoder-only models; this is an encoder-decoder ({model.architecture.family})")
    return model


def open_base(path: Path, config: dict[str, Any] | None = None) -> BaseCheckpoint:
    """The lazily read checkpoint of a plain model at a path; of an encoder-decoder model it gives the decoder. `config` is
    a directory's config.json, where it was read before."""
    if not path.is_dir():
        return GGUFCheckpoint(path)
    config = read_config(path) if config is None else config
    return Seq2SeqCheckpoint(path, config) if is_seq2seq(config) else HuggingFaceCheckpoint(path, config)


def open_source(source: str | Path) -> FathomModel | BaseCheckpoint:
    """What a conversion starts from: a plain decoder-only model as a checkpoint that is read a tensor at a time; a FathomLM
    model, a looped one, or one with an encoder, loaded whole. A configuration is read once."""
    path = locate(source)
    config = read_config(path) if path.is_dir() else {}
    if is_native(config):
        return load_native(path, config, None, torch.device("cpu"))
    base = open_base(path, config)
    lazily = base.plan.plain and base.encoder is None
    return base if lazily else load_base(base, None, torch.device("cpu"), str(path))


def plain_base(source: FathomModel | BaseCheckpoint | str | Path) -> BaseCheckpoint:
    """A model that is not tied yet, as a checkpoint that is read a tensor at a time."""
    source = open_source(source) if isinstance(source, str | Path) else source
    if not isinstance(source, FathomForCausalLM | FathomForSeq2SeqLM):
        return source
    if not source.plan.plain or source.relaxation is not None:
        raise OptionError(f"the model was converted already ({describe(source)}); convert the plain model it came from")
    return ModelBase(source)


def architecture_of(source: str | Path) -> tuple[Architecture, DepthPlan | None, Relaxation | None]:
    """What a source's configuration says, without its weights; a plan where it is looped or a FathomLM directory."""
    if (preset := named_preset(source)) is not None:
        return preset.architecture, preset.plan, None
    path = locate(source, config_only=True)
    if path.is_file():
        file = GGUFCheckpoint(path)
        return file.architecture, _looped(file.plan), None
    config = read_config(path)
    if is_native(config):
        return native_config(config, str(path)).build_parts()
    if is_seq2seq(config):
        return seq2seq_architecture(path, config), None, None
    architecture, plan = plan_from_config(config, str(path))
    return architecture, _looped(plan), None


def _looped(plan: DepthPlan) -> DepthPlan | None:
    return None if plan.plain else plan


def plan_of(source: str | Path, exits: str | Path | None = None) -> DepthPlan:
    """The plan that a source would run under, with the exits of a pack where one is given; no weight is read."""
    architecture, own, relaxation = architecture_of(source)
    plan = own or DepthPlan.vanilla(architecture.layers)
    return plan if exits is None else read_pack(exits).plan_over(architecture, plan, relaxation)


def encoder_of(source: str | Path) -> dict[str, Any] | None:
    """What a source's configuration says of its encoder; None of a decoder-only model."""
    if (preset := named_preset(source)) is not None:
        layers = preset.encoder_layers
        return encoder_beside(preset.architecture, layers, preset.encoder_fields) if layers else None
    path = locate(source, config_only=True)
    config = {} if path.is_file() else read_config(path)
    if is_seq2seq(config):
        return encoder_record(config)
    built = native_config(config, str(path)) if is_native(config) else None
    return dict(built.encoder_config) if isinstance(built, FathomSeq2SeqConfig) else None


def exits_of(source: str | Path) -> ExitParts:
    """What a source's configuration says that each of its exits has of its own."""
    if named_preset(source) is not None:
        return ExitParts()
    path = locate(source, config_only=True)
    config = {} if path.is_file() else read_config(path)
    return native_config(config, str(path)).exit_parts if is_native(config) else ExitParts()


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise OptionError(choices("dtype", dtype, DTYPES))
    return DTYPES[dtype]


def dtype_name(model: FathomModel) -> str:
    """The number format of a model's weights, as users write it."""
    return model.decoder.quantized or str(model.decoder.embed.weight.dtype).removeprefix("torch.")


def parse_device(device: torch.device | str) -> torch.device:
    """A device that this machine has."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"unknown device '{device}'; write cpu, cuda or cuda:0") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"'{device}' requires CUDA, but torch {torch.__version__} finds no such device here; use cpu")
    return place


def describe(model: Any) -> str:
    """A model's plan in a few words: "30 layers", "15 layers looped 2 times (cycle, lora)"."""
    plan: DepthPlan = model.plan
    layers = "1 layer" if plan.layout == "1" else f"{plan.layout} layers"
    notes = [plan.sharing] if plan.recursions > 1 else []
    notes += [] if model.relaxation is None else [model.relaxation.kind]
    notes += [] if plan.routing is None else [f"{plan.routing.kind}-choice router"]
    notes += {"cache": [], "share": ["shared KV"], "hybrid": ["hybrid KV"]}[plan.kv]
    looped = f" looped {plan.recursions} times" if plan.recursions > 1 else ""
    return f"{layers}{looped} ({', '.join(notes)})" if notes else layers
