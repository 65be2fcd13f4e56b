"""Llama (SmolLM, TinyLlama, Llama 3), and families that change little of its layers: Mistral, Granite, OLMo 2, SmolLM3,
and Phi 3 and Phi-4-mini with joined matrices, a part of each head rotated, and LongRoPE.

LongRoPE has two sets of factors, and a sequence that grows past the original context would turn all its earlier keys anew.
Here a model is read with the original context and its factors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    QKV,
    Config,
    Family,
    Fusion,
    llama_traits,
    rope_fields,
    rope_of,
    size,
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
PHI_NAMES = {**LLAMA_NAMES, "attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"}


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
    found = dataclasses.replace(read_llama(config, "smollm3"), rope=rope_of(config, 2_000_000.0))
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


def read_phi(config: Config) -> Architecture:
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name, default=False):
            raise UnsupportedModel(f"phi3 with {name} is not supported")
    traits = llama_traits(_with_original(config), "phi3")
    parameters = rope_fields(config)
    fraction = config.number("partial_rotary_factor", default=1.0)
    fraction = parameters.number("partial_rotary_factor", default=fraction) if parameters else fraction
    if traits["rope"].scaling == "longrope":
        traits["context"] = min(traits["context"], traits["rope"].original_context)
    return Architecture(**traits, rotary_fraction=fraction, windows=windows_of(config, traits["layers"]))


def _with_original(config: Config) -> Config:
    """Older configurations name the original context beside the rotary fields."""
    original = size(config, "original_max_position_embeddings", "original_context", None)
    for name in ("rope_parameters", "rope_scaling"):
        found = config.raw(name)
        if original is not None and isinstance(found, dict) and "original_max_position_embeddings" not in found:
            config = config.replaced({name: {**found, "original_max_position_embeddings": original}})
    return config


def write_phi(a: Architecture) -> dict[str, Any]:
    """A window is for all layers, as the format has it."""
    common = write_common(a)
    common["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    original = {"original_max_position_embeddings": a.rope.original_context if a.rope.scaling == "longrope" else a.context}
    window = write_windows(a)["sliding_window"]
    return {**common, **original, "hidden_act": HF_ACTIVATIONS[a.activation], "sliding_window": window,
            "partial_rotary_factor": a.rotary_fraction}  # fmt: skip


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
PHI3 = Family(
    model_type="phi3",
    architecture_class="Phi3ForCausalLM",
    read=read_phi,
    write=write_phi,
    layer_names=PHI_NAMES,
    fusions=(QKV, Fusion("mlp.gate_up", ("mlp.gate", "mlp.up"))),
)
