"""GPT-NeoX: Pythia."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    QKV,
    SIZES,
    Config,
    Family,
    activation_of,
    common,
    read_rope,
    rope_dict,
    rope_fields,
)
from fathomlm.depth import Architecture

NEOX_NAMES = {
    "attn.qkv": "attention.query_key_value",
    "attn.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm_attn": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
}
NEOX_OUTER = {
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "layers": "gpt_neox.layers",
}


def read_neox(config: Config) -> Architecture:
    sizes, bias = common(config), config.flag("attention_bias", default=True)
    parameters = rope_fields(config)
    fraction = config.number("rotary_pct", default=0.25)
    fraction = parameters.number("partial_rotary_factor", default=fraction) if parameters else fraction
    theta = config.number("rotary_emb_base", default=10_000.0)
    return Architecture(
        family="neox",
        **sizes | {"kv_heads": sizes["heads"], "head_dim": sizes["hidden"] // sizes["heads"]},
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", default=1e-5),
        activation=activation_of(config.text("hidden_act", default="gelu"), "gpt_neox"),
        gated=False,
        residual="parallel" if config.flag("use_parallel_residual", default=True) else "pre",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=read_rope(parameters, theta, "gpt_neox"),
        rotary_fraction=fraction,
    )


def write_neox(a: Architecture) -> dict[str, Any]:
    return {
        **{SIZES[field]: getattr(a, field) for field in SIZES if field not in ("kv_heads", "head_dim")},
        "tie_word_embeddings": a.tied_embeddings,
        "layer_norm_eps": a.norm_eps,
        "hidden_act": HF_ACTIVATIONS[a.activation],
        "use_parallel_residual": a.residual == "parallel",
        "attention_bias": a.qkv_bias,
        "rotary_pct": a.rotary_fraction,
        "rotary_emb_base": a.rope.theta,
        "rope_parameters": {**rope_dict(a.rope), "partial_rotary_factor": a.rotary_fraction},
    }


NEOX = Family(
    model_type="gpt_neox",
    architecture_class="GPTNeoXForCausalLM",
    read=read_neox,
    write=write_neox,
    layer_names=NEOX_NAMES,
    outer_names=NEOX_OUTER,
    fusions=(dataclasses.replace(QKV, by_head=True),),
)
