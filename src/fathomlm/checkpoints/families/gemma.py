"""Gemma 1 and the text side of Gemma 3."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.llama import LLAMA_NAMES
from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    activation_of,
    common,
    read_rope,
    rope_dict,
    rope_of,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

GEMMA3_NAMES = {
    **LLAMA_NAMES,
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}


def read_gemma(config: Config) -> Architecture:
    shape = {**common(config), "head_dim": int(config.get("head_dim") or 256)}
    if config.get("attention_bias"):
        raise UnsupportedModel("gemma with attention_bias")
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return Architecture(
        family="gemma",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation_of(activation, "gemma"),
        rope=rope_of(config),
        embedding_scale=shape["hidden"] ** 0.5,
    )


def write_gemma(a: Architecture) -> dict[str, Any]:
    activation = HF_ACTIVATIONS[a.activation]
    return {**write_common(a), "hidden_act": activation, "hidden_activation": activation}


def read_gemma3(config: Config) -> Architecture:
    shape = {**common(config), "head_dim": int(config.get("head_dim") or 256)}
    for option in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_bias",
        "use_bidirectional_attention",
    ):
        if config.get(option):
            raise UnsupportedModel(f"gemma3 with {option}={config[option]!r}")
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(shape["layers"])]
    parameters = config.get("rope_parameters") or {}
    old = read_rope(config.get("rope_scaling"), float(config.get("rope_theta") or 1_000_000.0), "gemma3_text")
    local_theta = float(config.get("rope_local_base_freq") or 10_000.0)
    return Architecture(
        family="gemma3",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation_of(config.get("hidden_activation") or "gelu_pytorch_tanh", "gemma3"),
        residual="sandwich",
        qk_norm=True,
        rope=read_rope(parameters["full_attention"], 1_000_000.0, "gemma3_text") if parameters else old,
        local_rope=read_rope(parameters.get("sliding_attention"), local_theta, "gemma3_text"),
        windows=windows_of({"sliding_window": 4096, "layer_types": kinds, **config}, shape["layers"]),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        embedding_scale=shape["hidden"] ** 0.5,
    )


def write_gemma3(a: Architecture) -> dict[str, Any]:
    assert a.local_rope is not None
    assert a.attention_scale is not None
    ropes = {"full_attention": rope_dict(a.rope), "sliding_attention": rope_dict(a.local_rope)}
    scalar = a.attention_scale**-2
    return {
        **write_common(a),
        **write_windows(a),
        "hidden_activation": HF_ACTIVATIONS[a.activation],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "rope_parameters": ropes,
    }
