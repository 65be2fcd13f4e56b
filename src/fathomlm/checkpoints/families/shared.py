"""What a family is, and what the families' configurations have in common: sizes, rotary scaling, windows, activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from fathomlm.depth import Architecture, Rope
from fathomlm.depth.bounds import BOUNDS
from fathomlm.errors import UnsupportedModel
from fathomlm.jsonfile import Fields

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

    @property
    def fused_qkv(self) -> bool:
        """Whether q, k and v of each head are kept together in one matrix."""
        return "attn.qkv" in self.layer_names


@overload
def size(config: Config, name: str, bound: str) -> int: ...
@overload
def size(config: Config, name: str, bound: str, default: int) -> int: ...
@overload
def size(config: Config, name: str, bound: str, default: None) -> int | None: ...
def size(config: Config, name: str, bound: str, default: int | None = -1) -> int | None:
    """A size of a configuration, within the bounds that models here have."""
    least, most = BOUNDS[bound]
    if default == -1:
        return config.integer(name, at_least=least, at_most=most)
    return config.integer(name, at_least=least, at_most=most, default=default)


def read_rope(found: Fields | None, theta: float, where: str) -> Rope:
    """A rotary specification, from the dictionary that newer configurations have or the fields of older ones."""
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
    raise UnsupportedModel(f"{where} asks for '{kind:.60}' rotary scaling; known: default, linear, llama3")


def rope_of(config: Config, default_theta: float = 10_000.0) -> Rope:
    parameters = config.record("rope_parameters", default=None) or config.record("rope_scaling", default=None)
    return read_rope(parameters, config.number("rope_theta", default=default_theta), config.text("model_type"))


def rope_dict(rope: Rope) -> dict[str, Any]:
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "linear":
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def activation_of(name: str, family: str) -> Any:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{family} with activation '{name:.60}'; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def common(config: Config) -> dict[str, Any]:
    """Fields that every family but GPT-NeoX spells alike."""
    heads = size(config, "num_attention_heads", "heads")
    hidden = size(config, "hidden_size", "hidden")
    return {
        "layers": size(config, "num_hidden_layers", "layers"),
        "hidden": hidden,
        "intermediate": size(config, "intermediate_size", "intermediate"),
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", "kv_heads", heads),
        "head_dim": size(config, "head_dim", "head_dim", hidden // heads),
        "vocab": size(config, "vocab_size", "vocab"),
        "context": size(config, "max_position_embeddings", "context", 2048),
    }


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
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.context,
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
