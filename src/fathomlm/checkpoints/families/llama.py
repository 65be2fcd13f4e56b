"""Llama (SmolLM, TinyLlama, Llama 3) and Mistral."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    llama_traits,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture

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


def read_llama(config: Config) -> Architecture:
    traits = llama_traits(config, "llama")
    bias = config.flag("attention_bias", default=False)
    return Architecture(
        **traits,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def write_llama(a: Architecture) -> dict[str, Any]:
    extra = {"hidden_act": HF_ACTIVATIONS[a.activation], "attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    return {**write_common(a), **extra}


def read_mistral(config: Config) -> Architecture:
    traits = llama_traits(config, "mistral")
    return Architecture(
        **traits,
        windows=windows_of(config, traits["layers"]),
    )


def write_mistral(a: Architecture) -> dict[str, Any]:
    """Mistral has one window for all layers, so it is written without layer types."""
    window = write_windows(a)["sliding_window"]
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], "sliding_window": window}
