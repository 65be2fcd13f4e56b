"""Llama (SmolLM, TinyLlama, Llama 3), and families that change little of its layers: Mistral, Granite, OLMo 2, SmolLM3."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    Config,
    Family,
    llama_traits,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

OLMO2_NAMES = {
    **LLAMA_NAMES,
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}


def read_llama(config: Config, family: str = "llama") -> Architecture:
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return Architecture(**llama_traits(config, family), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def write_llama(a: Architecture) -> dict[str, Any]:
    extra = {"hidden_act": HF_ACTIVATIONS[a.activation], "attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    return {**write_common(a), **extra}


def read_mistral(config: Config) -> Architecture:
    traits = llama_traits(config, "mistral")
    return Architecture(**traits, windows=windows_of(config, traits["layers"]))


def write_mistral(a: Architecture) -> dict[str, Any]:
    """Mistral has one window for all layers, so it is written without layer types."""
    window = write_windows(a)["sliding_window"]
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], "sliding_window": window}


def read_granite(config: Config) -> Architecture:
    """Factors on embeddings, scores, what each half adds, and logits."""
    return dataclasses.replace(
        read_llama(config, "granite"),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        attention_scale=config.number("attention_multiplier", default=1.0),
        residual_scale=config.number("residual_multiplier", default=1.0),
        head_scale=1.0 / config.number("logits_scaling", default=1.0),
    )


def write_granite(a: Architecture) -> dict[str, Any]:
    return {
        **write_llama(a),
        "embedding_multiplier": a.embedding_scale,
        "attention_multiplier": a.scale,
        "residual_multiplier": a.residual_scale,
        "logits_scaling": 1.0 / a.head_scale,
    }


def read_olmo2(config: Config) -> Architecture:
    """Norms after each half, and over all heads of queries and keys at once."""
    bias = config.flag("attention_bias", default=False)
    traits = {**llama_traits(config, "olmo2"), "norm_eps": config.number("rms_norm_eps", default=1e-5)}
    return Architecture(**traits, residual="post", qk_norm=True, qk_norm_wide=True, qkv_bias=bias, o_bias=bias)


def write_olmo2(a: Architecture) -> dict[str, Any]:
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], "attention_bias": a.qkv_bias}


def read_smollm3(config: Config) -> Architecture:
    """Some layers are without rotary positions."""
    found = read_llama(config, "smollm3")
    every = config.integer("no_rope_layer_interval", at_least=1, default=4)
    usual = [int((i + 1) % every != 0) for i in range(found.layers)]
    given = config.integers("no_rope_layers", at_least=0, at_most=1) if config.raw("no_rope_layers") else usual
    if len(given) != found.layers:
        raise UnsupportedModel(f"no_rope_layers names {len(given)} layers, the model has {found.layers}")
    rotated = tuple(bool(uses) for uses in given)  # 1 means that a layer does use rotary positions
    windows = windows_of(config, found.layers) if config.flag("use_sliding_window", default=False) else ()
    return dataclasses.replace(found, rotated=() if all(rotated) else rotated, windows=windows)


def write_smollm3(a: Architecture) -> dict[str, Any]:
    rotated = [int(a.rotates(i)) for i in range(a.layers)]
    windows = {"use_sliding_window": bool(a.windows), **write_windows(a)}
    return {**write_llama(a), "no_rope_layers": rotated, **windows}


LLAMA = Family(model_type="llama", architecture_class="LlamaForCausalLM", read=read_llama, write=write_llama)
MISTRAL = Family(model_type="mistral", architecture_class="MistralForCausalLM", read=read_mistral, write=write_mistral)
GRANITE = Family(model_type="granite", architecture_class="GraniteForCausalLM", read=read_granite, write=write_granite)
OLMO2 = Family(
    model_type="olmo2",
    architecture_class="Olmo2ForCausalLM",
    read=read_olmo2,
    write=write_olmo2,
    layer_names=OLMO2_NAMES,
)
SMOLLM3 = Family(model_type="smollm3", architecture_class="SmolLM3ForCausalLM", read=read_smollm3, write=write_smollm3)
