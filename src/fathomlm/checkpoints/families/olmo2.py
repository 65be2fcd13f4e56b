"""OLMo 2: norms after each half, and over all heads of queries and keys at once."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import HF_ACTIVATIONS, LLAMA_NAMES, Config, Family, llama_traits, write_common
from fathomlm.depth import Architecture

OLMO2_NAMES = {
    **LLAMA_NAMES,
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}


def read_olmo2(config: Config) -> Architecture:
    bias = config.flag("attention_bias", default=False)
    traits = {**llama_traits(config, "olmo2"), "norm_eps": config.number("rms_norm_eps", default=1e-5)}
    return Architecture(**traits, residual="post", qk_norm=True, qk_norm_wide=True, qkv_bias=bias, o_bias=bias)


def write_olmo2(a: Architecture) -> dict[str, Any]:
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], "attention_bias": a.qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    architecture_class="Olmo2ForCausalLM",
    read=read_olmo2,
    write=write_olmo2,
    layer_names=OLMO2_NAMES,
)
