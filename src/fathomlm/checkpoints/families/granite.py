"""Granite 3: Llama's layers with factors on embeddings, scores, what each half adds, and logits."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import HF_ACTIVATIONS, Config, Family, llama_traits, write_common
from fathomlm.depth import Architecture


def read_granite(config: Config) -> Architecture:
    traits, bias = llama_traits(config, "granite"), config.flag("attention_bias", default=False)
    return Architecture(
        **traits,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        attention_scale=config.number("attention_multiplier", default=1.0),
        residual_scale=config.number("residual_multiplier", default=1.0),
        head_scale=1.0 / config.number("logits_scaling", default=1.0),
    )


def write_granite(a: Architecture) -> dict[str, Any]:
    return {
        **write_common(a),
        "hidden_act": HF_ACTIVATIONS[a.activation],
        "attention_bias": a.qkv_bias,
        "mlp_bias": a.mlp_bias,
        "embedding_multiplier": a.embedding_scale,
        "attention_multiplier": a.scale,
        "residual_multiplier": a.residual_scale,
        "logits_scaling": 1.0 / a.head_scale,
    }


GRANITE = Family(model_type="granite", architecture_class="GraniteForCausalLM", read=read_granite, write=write_granite)
