"""What a family is, and what the families' configurations have in common: sizes, rotary scaling, windows, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from fathomlm.depth import Architecture, DepthPlan, Rope
from fathomlm.depth.bounds import BOUNDS
from fathomlm.errors import UnsupportedModel
from fathomlm.fields import REQUIRED, Fields

Config = Fields
LLAMA_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm_attn": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
}
LLAMA_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layers": "model.layers"}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def plain_plan(config: Config, architecture: Architecture) -> DepthPlan:
    """Every layer once."""
    return DepthPlan.vanilla(architecture.layers)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Matrices that a format keeps as one, below each other."""

    name: str
    parts: tuple[str, ...]
    by_head: bool = False
    """Whether the parts of each head lie together (GPT-NeoX), or each part is whole (Phi)."""
    end: str | None = None
    """Which of the parts' tensors are kept so, weight or bias; None is both. A bias alone keeps its heads apart (Huginn)."""

    def join(self, tensors: Sequence[Tensor], heads: int) -> Tensor:
        if self.end == "bias":
            return torch.stack([t.view(1, heads, -1) for t in tensors])
        if not self.by_head:
            return torch.cat(tuple(tensors))
        return torch.stack([t.view(heads, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 2).contiguous()

    def split(self, fused: Tensor, part: str, architecture: Architecture) -> Tensor:
        """One of the matrices."""
        if self.by_head:
            by_head = fused.view(architecture.heads, len(self.parts), -1, *fused.shape[1:])
            return by_head[:, self.parts.index(part)].reshape(-1, *fused.shape[1:]).contiguous()
        fused = fused.flatten() if self.end == "bias" else fused
        heights = {spec.path: spec.outputs for spec in architecture.linears()}
        first = sum(heights[other] for other in self.parts[: self.parts.index(part)])
        return fused[first : first + heights[part]].clone()


QKV = Fusion("attn.qkv", ("attn.q", "attn.k", "attn.v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one Hugging Face model type is read and written."""

    model_type: str
    architecture_class: str
    """The class that transformers, vLLM and llama.cpp know it by."""
    read: Callable[[Config], Architecture]
    write: Callable[[Architecture], dict[str, Any]]
    layer_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Hugging Face's names for the modules of a layer, by ours."""
    outer_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_OUTER)
    ungated_names: Mapping[str, str] | None = None
    """`layer_names` of versions without a gate, where those differ."""
    plan: Callable[[Config, Architecture], DepthPlan] = plain_plan
    """What a configuration says of loops. An architecture's `layers` are those of the unrolled depth."""
    write_loops: Callable[[Architecture, DepthPlan], dict[str, Any]] | None = None
    """The configuration of a looped plan, where the format has loops; other formats hold it unrolled."""
    exit_gate: bool = False
    """Whether a looped model of this format has exits after its loops, with a gate."""

    injection: bool = False
    """Whether the loops of this format begin with an injection, between a prelude and a coda."""
    fusions: tuple[Fusion, ...] = ()
    complete: Callable[[Collection[str]], dict[str, Any]] | None = None
    """Fields of the configuration that the names of a checkpoint's tensors say, where the configuration does not."""
    variant: Callable[[Family, Architecture, DepthPlan], Family] | None = None
    """The family as one of its models has it, where names depend on more than the family."""
    sections: tuple[tuple[str, int], ...] = ()
    """Where layers lie, and how many there, one section behind the other; empty where all lie under `outer_names`."""
    adjacent_pairs: bool = False
    """Whether heads turn adjacent pairs; here each entry is paired with the one half a head on."""

    def fusion(self, module: str, end: str) -> Fusion | None:
        """What a linear of a layer is a part of."""
        fits = (fusion for fusion in self.fusions if module in fusion.parts and fusion.end in (None, end))
        return next(fits, None)

    def sorted_rows(self, module: str, tensor: Tensor, head_dim: int, *, back: bool = False) -> Tensor:
        """Queries' and keys' rows with each head's pairs as we have them, from how the format has them, or `back`."""
        if not self.adjacent_pairs or module not in ("attn.q", "attn.k"):
            return tensor
        half = head_dim // 2
        inner = (2, half) if back else (half, 2)
        return tensor.view(-1, *inner, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


@overload
def size(config: Config, name: str, bound: str, default: int = REQUIRED) -> int: ...
@overload
def size(config: Config, name: str, bound: str, default: None) -> int | None: ...
def size(config: Config, name: str, bound: str, default: int | None = REQUIRED) -> int | None:
    """A size of a configuration, within the bounds that models here have."""
    least, most = BOUNDS[bound]
    return config.integer(name, at_least=least, at_most=most, default=default)


def read_rope(found: Fields | None, theta: float, where: str, context: int = 2048) -> Rope:
    """A rotary specification, from the dictionary that newer configurations have or the fields of older ones. `context` is
    the longest sequence that the configuration names."""
    if found is None:
        return Rope(theta=theta)
    kind = found.text("rope_type", default=None) or found.text("type", default="default")
    theta = found.number("rope_theta", default=theta)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=found.number("factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            scaling="llama3",
            factor=found.number("factor"),
            low_freq_factor=found.number("low_freq_factor"),
            high_freq_factor=found.number("high_freq_factor"),
            original_context=size(found, "original_max_position_embeddings", "original_context"),
        )
    if kind == "yarn":
        return _read_yarn(found, theta, context)
    if kind == "longrope":
        return _read_longrope(found, theta, context)
    raise UnsupportedModel(f"{where} asks for '{kind:.60}' rotary scaling; known: {', '.join(ROPE_KINDS)}")


ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def _read_yarn(found: Fields, theta: float, context: int) -> Rope:
    factor = found.number("factor")
    given, part, whole = (found.number(name, default=0.0) for name in ("attention_factor", "mscale", "mscale_all_dim"))

    def stretched(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = stretched(part) / stretched(whole) if part and whole else stretched(1.0)
    return Rope(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=size(found, "original_max_position_embeddings", "original_context", context),
        beta_fast=found.number("beta_fast", default=32.0),
        beta_slow=found.number("beta_slow", default=1.0),
        truncate=found.flag("truncate", default=True),
        attention_factor=given or usual,
    )


def _read_longrope(found: Fields, theta: float, context: int) -> Rope:
    """The factors of the original context. Those beyond it would turn every key anew when a sequence grows past it."""
    original = size(found, "original_max_position_embeddings", "original_context", context)
    factor = found.number("factor", default=max(1.0, context / original))
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return Rope(
        theta=theta,
        scaling="longrope",
        original_context=original,
        attention_factor=found.number("attention_factor", default=0.0) or usual,
        factors=tuple(found.numbers("short_factor")),
    )


def rope_fields(config: Config) -> Fields | None:
    """The rotary fields. Where a configuration has both spellings, the older one counts, as it does in transformers: people
    add it by hand to what a newer version wrote, to stretch the context."""
    return config.record("rope_scaling", default=None) or config.record("rope_parameters", default=None)


def rope_of(config: Config, default_theta: float = 10_000.0) -> Rope:
    parameters = rope_fields(config)
    context = size(config, "max_position_embeddings", "context", 2048)
    return read_rope(parameters, config.number("rope_theta", default=default_theta), config.text("model_type"), context)


def rope_dict(rope: Rope) -> dict[str, Any]:
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "linear":
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.factor}
    common = {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        "original_max_position_embeddings": rope.original_context,
    }
    if rope.scaling == "yarn":
        blend = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        return {**common, "factor": rope.factor, "attention_factor": rope.attention_factor, **blend}
    if rope.scaling == "longrope":
        factors = list(rope.factors)
        return {**common, "attention_factor": rope.attention_factor, "short_factor": factors, "long_factor": factors}
    ends = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return {**common, "factor": rope.factor, **ends}


def activation_of(name: str, family: str) -> Any:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{family} with activation '{name:.60}'; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
"""How most families call the sizes of an architecture."""


def common(config: Config) -> dict[str, Any]:
    """The sizes, by our names."""
    heads, hidden = size(config, SIZES["heads"], "heads"), size(config, SIZES["hidden"], "hidden")
    usual = {"kv_heads": heads, "head_dim": hidden // heads, "context": 2048}
    return {field: size(config, name, field, usual.get(field, REQUIRED)) for field, name in SIZES.items()}


def llama_traits(config: Config, family: str) -> dict[str, Any]:
    """What Llama, Mistral and Qwen spell alike beyond their sizes."""
    return {
        "family": family,
        **common(config),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "activation": activation_of(config.text("hidden_act", default="silu"), family),
        "rope": rope_of(config),
    }


def write_common(a: Architecture) -> dict[str, Any]:
    return {
        **{name: getattr(a, field) for field, name in SIZES.items()},
        "tie_word_embeddings": a.tied_embeddings,
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": rope_dict(a.rope),
    }


def windows_of(
    config: Config, layers: int, kinds: list[str] | None = None, window: int | None = None
) -> tuple[int | None, ...]:
    """The window of each layer, from layer_types where the configuration has them; `kinds` and `window` where not."""
    window = size(config, "sliding_window", "window", window)
    kinds = config.texts("layer_types", default=[]) or kinds
    if window is None:
        return ()
    if kinds is None:
        return (window,) * layers
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"layer types {', '.join(unknown[:4]):.100}; known: full_attention, sliding_attention")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers, the model has {layers}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def write_windows(a: Architecture) -> dict[str, Any]:
    sizes = {window for window in a.windows if window is not None}
    kinds = ["full_attention" if a.window(i) is None else "sliding_attention" for i in range(a.layers)]
    return {"sliding_window": max(sizes) if sizes else None, "layer_types": kinds}
