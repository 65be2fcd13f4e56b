"""GPT-NeoX: Pythia."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import HF_ACTIVATIONS, Config, activation_of, read_rope, rope_dict
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
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", True))
    parameters = config.get("rope_parameters") or {}
    fraction = float(parameters.get("partial_rotary_factor") or config.get("rotary_pct") or 0.25)
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
        activation=activation_of(config.get("hidden_act", "gelu"), "gpt_neox"),
        gated=False,
        residual="parallel" if config.get("use_parallel_residual", True) else "pre",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=read_rope(parameters or config.get("rope_scaling"), theta, "gpt_neox"),
        rotary_fraction=fraction,
    )


def write_neox(a: Architecture) -> dict[str, Any]:
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
        "rope_parameters": {**rope_dict(a.rope), "partial_rotary_factor": a.rotary_fraction},
    }
