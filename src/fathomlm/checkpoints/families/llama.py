"""Llama (SmolLM, TinyLlama, Llama 3) and Mistral."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    Family,
    llama_traits,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture


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


LLAMA = Family(model_type="llama", architecture_class="LlamaForCausalLM", read=read_llama, write=write_llama)
MISTRAL = Family(model_type="mistral", architecture_class="MistralForCausalLM", read=read_mistral, write=write_mistral)
