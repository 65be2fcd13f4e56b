"""Families: how Hugging Face spells each architecture, and how it names the tensors. One entry a family, one dict.

Reading goes from a `config.json` to an `Architecture`; exporting goes back. An option that has no block here is refused
by name rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fathomlm.depth import Architecture, Rope
from fathomlm.errors import UnsupportedModel

Config = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

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
GEMMA3_NAMES = {
    **LLAMA_NAMES,
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}
NEOX_NAMES = {
    "attn.qkv": "attention.query_key_value",
    "attn.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm_attn": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
}
LLAMA_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layers": "model.layers"}
NEOX_OUTER = {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out", "layers": "gpt_neox.layers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one Hugging Face model type is read and written."""

    model_type: str
    architecture_class: str
    """The class that transformers, vLLM and llama.cpp know it by."""
    read: Callable[[Config], Architecture]
    write: Callable[[Architecture], dict[str, Any]]
    layer_names: Mapping[str, str]
    outer_names: Mapping[str, str]


def _rope(parameters: Mapping[str, Any] | None, theta: float, where: str) -> Rope:
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


def _rope_of(config: Config, default_theta: float = 10_000.0) -> Rope:
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    return _rope(parameters, float(config.get("rope_theta") or default_theta), str(config["model_type"]))


def _rope_dict(rope: Rope) -> dict[str, Any]:
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


def _activation(name: str, family: str) -> Any:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{family} with activation '{name}'; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def _common(config: Config) -> dict[str, Any]:
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


def _write_common(a: Architecture) -> dict[str, Any]:
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
        "rope_parameters": _rope_dict(a.rope),
    }


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
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


def _write_windows(a: Architecture) -> dict[str, Any]:
    sizes = {window for window in a.windows if window is not None}
    kinds = ["full_attention" if a.window(i) is None else "sliding_attention" for i in range(a.layers)]
    return {"sliding_window": max(sizes) if sizes else None, "layer_types": kinds}


def _read_llama(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        family="llama",
        **_common(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config.get("hidden_act", "silu"), "llama"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=_rope_of(config),
    )


def _write_llama(a: Architecture) -> dict[str, Any]:
    extra = {"hidden_act": HF_ACTIVATIONS[a.activation], "attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    return {**_write_common(a), **extra}


def _read_mistral(config: Config) -> Architecture:
    shape = _common(config)
    return Architecture(
        family="mistral",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config.get("hidden_act", "silu"), "mistral"),
        rope=_rope_of(config),
        windows=_windows(config, shape["layers"]),
    )


def _write_mistral(a: Architecture) -> dict[str, Any]:
    """Mistral has one window for all layers, so it is written without layer types."""
    window = _write_windows(a)["sliding_window"]
    return {**_write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], "sliding_window": window}


def _qwen_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen: a window only if use_sliding_window says so, and then from layer max_window_layers on."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return ()
    first = int(config.get("max_window_layers", 28))
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _windows({"layer_types": kinds, **{k: v for k, v in config.items() if v is not None}}, layers)


def _read_qwen2(config: Config) -> Architecture:
    shape = _common(config)
    return Architecture(
        family="qwen2",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config.get("hidden_act", "silu"), "qwen2"),
        qkv_bias=True,
        rope=_rope_of(config),
        windows=_qwen_windows(config, shape["layers"]),
    )


def _read_qwen3(config: Config) -> Architecture:
    shape = {**_common(config), "head_dim": int(config.get("head_dim") or 128)}
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        family="qwen3",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config.get("hidden_act", "silu"), "qwen3"),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        rope=_rope_of(config),
        windows=_qwen_windows(config, shape["layers"]),
    )


def _write_qwen(a: Architecture) -> dict[str, Any]:
    bias = {"attention_bias": a.qkv_bias} if a.family == "qwen3" else {}
    windows = {**_write_windows(a), "use_sliding_window": bool(a.windows)}
    return {**_write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], **bias, **windows}


def _read_gemma(config: Config) -> Architecture:
    shape = {**_common(config), "head_dim": int(config.get("head_dim") or 256)}
    if config.get("attention_bias"):
        raise UnsupportedModel("gemma with attention_bias")
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return Architecture(
        family="gemma",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(activation, "gemma"),
        rope=_rope_of(config),
        embedding_scale=shape["hidden"] ** 0.5,
    )


def _write_gemma(a: Architecture) -> dict[str, Any]:
    activation = HF_ACTIVATIONS[a.activation]
    return {**_write_common(a), "hidden_act": activation, "hidden_activation": activation}


def _read_gemma3(config: Config) -> Architecture:
    shape = {**_common(config), "head_dim": int(config.get("head_dim") or 256)}
    for option in ("attn_logit_softcapping", "final_logit_softcapping", "attention_bias", "use_bidirectional_attention"):
        if config.get(option):
            raise UnsupportedModel(f"gemma3 with {option}={config[option]!r}")
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(shape["layers"])]
    parameters = config.get("rope_parameters") or {}
    old = _rope(config.get("rope_scaling"), float(config.get("rope_theta") or 1_000_000.0), "gemma3_text")
    local_theta = float(config.get("rope_local_base_freq") or 10_000.0)
    return Architecture(
        family="gemma3",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config.get("hidden_activation") or "gelu_pytorch_tanh", "gemma3"),
        residual="sandwich",
        qk_norm=True,
        rope=_rope(parameters["full_attention"], 1_000_000.0, "gemma3_text") if parameters else old,
        local_rope=_rope(parameters.get("sliding_attention"), local_theta, "gemma3_text"),
        windows=_windows({"sliding_window": 4096, "layer_types": kinds, **config}, shape["layers"]),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        embedding_scale=shape["hidden"] ** 0.5,
    )


def _write_gemma3(a: Architecture) -> dict[str, Any]:
    assert a.local_rope is not None
    assert a.attention_scale is not None
    ropes = {"full_attention": _rope_dict(a.rope), "sliding_attention": _rope_dict(a.local_rope)}
    scalar = a.attention_scale**-2
    return {
        **_write_common(a),
        **_write_windows(a),
        "hidden_activation": HF_ACTIVATIONS[a.activation],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "rope_parameters": ropes,
    }


def _read_neox(config: Config) -> Architecture:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", True))
    parameters = config.get("rope_parameters") or {}
    fraction = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    theta = float(config.get("rotary_emb_base") or config.get("rope_theta") or 10_000.0)
    return Architecture(
        family="neox",
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=int(config["vocab_size"]),
        context=int(config.get("max_position_embeddings", 2048)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm="layer",
        norm_eps=float(config.get("layer_norm_eps", 1e-5)),
        activation=_activation(config.get("hidden_act", "gelu"), "gpt_neox"),
        gated=False,
        residual="parallel" if config.get("use_parallel_residual", True) else "pre",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=_rope(parameters or config.get("rope_scaling"), theta, "gpt_neox"),
        rotary_fraction=float(fraction),
    )


def _write_neox(a: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_attention_heads": a.heads,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.context,
        "tie_word_embeddings": a.tied_embeddings,
        "layer_norm_eps": a.norm_eps,
        "hidden_act": HF_ACTIVATIONS[a.activation],
        "use_parallel_residual": a.residual == "parallel",
        "attention_bias": a.qkv_bias,
        "rotary_pct": a.rotary_fraction,
        "rotary_emb_base": a.rope.theta,
        "rope_parameters": {**_rope_dict(a.rope), "partial_rotary_factor": a.rotary_fraction},
    }


def _family(model_type: str, cls: str, read: Any, write: Any, names: Mapping[str, str] = LLAMA_NAMES) -> Family:
    outer = NEOX_OUTER if model_type == "gpt_neox" else LLAMA_OUTER
    return Family(
        model_type=model_type, architecture_class=cls, read=read, write=write, layer_names=names, outer_names=outer
    )


FAMILIES: dict[str, Family] = {
    "llama": _family("llama", "LlamaForCausalLM", _read_llama, _write_llama),
    "mistral": _family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral),
    "qwen2": _family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen),
    "qwen3": _family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen),
    "gemma": _family("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma),
    "gemma3": _family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, GEMMA3_NAMES),
    "neox": _family("gpt_neox", "GPTNeoXForCausalLM", _read_neox, _write_neox, NEOX_NAMES),
}


def family_of(config: Config, where: str) -> Family:
    """The family of a Hugging Face configuration, or an error that lists the known ones."""
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES.values())
    raise UnsupportedModel(f"{where}: model type {model_type!r} has no block here; known: {known}")


def hf_name(family: Family, name: str) -> str:
    """Hugging Face's name for one of our tensors (GPT-NeoX's fused qkv is taken apart elsewhere)."""
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{family.outer_names[parts[0]]}.{parts[-1]}"
    inner = ".".join(parts[2:-1])
    return f"{family.outer_names['layers']}.{parts[1]}.{family.layer_names[inner]}.{parts[-1]}"
