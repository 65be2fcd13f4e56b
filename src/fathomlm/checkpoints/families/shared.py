"""What the families' configurations have in common: sizes, rotary scaling, windows, activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathomlm.depth import Architecture, Rope
from fathomlm.errors import UnsupportedModel

Config = Mapping[str, Any]
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def read_rope(parameters: Mapping[str, Any] | None, theta: float, where: str) -> Rope:
    """A rotary specification, from the dictionary that newer configurations have or the fields of older ones."""
    found = dict(parameters or {})
    kind = found.get("rope_type", found.get("type", "default"))
    theta = float(found.get("rope_theta", theta))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=float(found["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            scaling="llama3",
            factor=float(found["factor"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
            original_context=int(found["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"{where} asks for '{kind}' rotary scaling; known: default, linear, llama3")


def rope_of(config: Config, default_theta: float = 10_000.0) -> Rope:
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    return read_rope(parameters, float(config.get("rope_theta") or default_theta), str(config["model_type"]))


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
        raise UnsupportedModel(f"{family} with activation '{name}'; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def common(config: Config) -> dict[str, Any]:
    """Fields that every family but GPT-NeoX spells alike."""
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return {
        "layers": int(config["num_hidden_layers"]),
        "hidden": hidden,
        "intermediate": int(config["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocab": int(config["vocab_size"]),
        "context": int(config.get("max_position_embeddings", 2048)),
    }


def llama_traits(config: Config, family: str) -> dict[str, Any]:
    """What Llama, Mistral and Qwen spell alike beyond their sizes."""
    return {
        "family": family,
        **common(config),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": activation_of(config.get("hidden_act", "silu"), family),
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


def windows_of(config: Config, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from layer_types where the configuration has them."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if window is None:
        return ()
    if kinds is None:
        return (int(window),) * layers
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"layer types {', '.join(unknown)}; known: full_attention, sliding_attention")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers, the model has {layers}")
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def write_windows(a: Architecture) -> dict[str, Any]:
    sizes = {window for window in a.windows if window is not None}
    kinds = ["full_attention" if a.window(i) is None else "sliding_attention" for i in range(a.layers)]
    return {"sliding_window": max(sizes) if sizes else None, "layer_types": kinds}
