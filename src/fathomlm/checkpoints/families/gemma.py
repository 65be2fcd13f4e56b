"""Gemma 1 and the text side of Gemma 3."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    Config,
    Family,
    activation_of,
    common,
    read_rope,
    rope_dict,
    rope_of,
    size,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel
from fathomlm.fields import shown

GEMMA3_NAMES = {
    **LLAMA_NAMES,
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}


def read_gemma(config: Config) -> Architecture:
    shape = {**common(config), "head_dim": size(config, "head_dim", "head_dim", 256)}
    if config.flag("attention_bias", default=False):
        raise UnsupportedModel("gemma with attention_bias")
    activation = config.text("hidden_activation", default="gelu_pytorch_tanh")
    return Architecture(
        family="gemma",
        **shape,
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        norm="rms_plus_one",
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        activation=activation_of(activation, "gemma"),
        rope=rope_of(config),
        embedding_scale=shape["hidden"] ** 0.5,
    )


def write_gemma(a: Architecture) -> dict[str, Any]:
    activation = HF_ACTIVATIONS[a.activation]
    return {**write_common(a), "hidden_act": activation, "hidden_activation": activation}


def read_gemma3(config: Config) -> Architecture:
    shape = {**common(config), "head_dim": size(config, "head_dim", "head_dim", 256)}
    for option in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_bias",
        "use_bidirectional_attention",
    ):
        if config.raw(option):
            raise UnsupportedModel(f"gemma3 with {option}={shown(config.raw(option))}")
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((found for name in names if (found := size(config, name, "layers", None)) is not None), 6)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(shape["layers"])]
    parameters = config.record("rope_parameters", default=None)
    theta = config.number("rope_theta", default=1_000_000.0)
    scaling = config.record("rope_scaling", default=None)
    full = parameters.record("full_attention") if parameters else None
    full = full.replaced(scaling.values) if full and scaling else full or scaling
    local = parameters.record("sliding_attention", default=None) if parameters else None
    local_theta = config.number("rope_local_base_freq", default=10_000.0)
    return Architecture(
        family="gemma3",
        **shape,
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        norm="rms_plus_one",
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        activation=activation_of(config.text("hidden_activation", default="gelu_pytorch_tanh"), "gemma3"),
        residual="sandwich",
        qk_norm=True,
        rope=read_rope(full, theta, "gemma3_text"),
        local_rope=read_rope(local, local_theta, "gemma3_text"),
        windows=windows_of(config, shape["layers"], kinds, None if "sliding_window" in config else 4096),
        attention_scale=config.number("query_pre_attn_scalar", at_least=1e-6, default=256.0) ** -0.5,
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


GEMMA = Family(model_type="gemma", architecture_class="GemmaForCausalLM", read=read_gemma, write=write_gemma)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture_class="Gemma3ForCausalLM",
    read=read_gemma3,
    write=write_gemma3,
    layer_names=GEMMA3_NAMES,
)
