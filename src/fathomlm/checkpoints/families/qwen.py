"""Qwen 2, 2.5 and 3, and Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    Config,
    Family,
    llama_traits,
    size,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

MOE_NAMES = LLAMA_NAMES | {
    "mlp.router": "mlp.gate",
    "mlp.gate": "mlp.experts.*.gate_proj",
    "mlp.up": "mlp.experts.*.up_proj",
    "mlp.down": "mlp.experts.*.down_proj",
}
"""A * stands for the number of an expert: ours are one tensor."""


def _qwen_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen: a window only if use_sliding_window says so, and then from layer max_window_layers on."""
    if not config.flag("use_sliding_window", default=False):
        return ()
    first = config.integer("max_window_layers", at_least=0, default=28)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows_of(config, layers, kinds)


def read_qwen2(config: Config) -> Architecture:
    traits = llama_traits(config, "qwen2")
    return Architecture(
        **traits,
        qkv_bias=True,
        windows=_qwen_windows(config, traits["layers"]),
    )


def read_qwen3(config: Config) -> Architecture:
    traits = {**llama_traits(config, "qwen3"), "head_dim": size(config, "head_dim", "head_dim", 128)}
    bias = config.flag("attention_bias", default=False)
    return Architecture(
        **traits,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=_qwen_windows(config, traits["layers"]),
    )


def write_qwen(a: Architecture) -> dict[str, Any]:
    bias = {"attention_bias": a.qkv_bias} if a.family == "qwen3" else {}
    windows = {**write_windows(a), "use_sliding_window": bool(a.windows)}
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], **bias, **windows}


def read_qwen3_moe(config: Config) -> Architecture:
    if config.raw("mlp_only_layers") or config.integer("decoder_sparse_step", at_least=0, default=1) != 1:
        raise UnsupportedModel(
            "qwen3_moe with layers that have no experts (mlp_only_layers, decoder_sparse_step) is not supported"
        )
    dense = config.replaced({"intermediate_size": size(config, "moe_intermediate_size", "intermediate")})
    return dataclasses.replace(
        read_qwen3(dense),
        family="qwen3_moe",
        experts=size(config, "num_experts", "experts", None) or size(config, "num_local_experts", "experts"),
        experts_per_token=size(config, "num_experts_per_tok", "experts_per_token"),
        experts_normed=config.flag("norm_topk_prob", default=False),
    )


def write_qwen3_moe(a: Architecture) -> dict[str, Any]:
    own = {"moe_intermediate_size": a.intermediate, "num_experts": a.experts, "num_experts_per_tok": a.experts_per_token}
    fixed = {"norm_topk_prob": a.experts_normed, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**write_qwen(a), **own, **fixed, "attention_bias": a.qkv_bias}


QWEN2 = Family(model_type="qwen2", architecture_class="Qwen2ForCausalLM", read=read_qwen2, write=write_qwen)
QWEN3 = Family(model_type="qwen3", architecture_class="Qwen3ForCausalLM", read=read_qwen3, write=write_qwen)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture_class="Qwen3MoeForCausalLM",
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    layer_names=MOE_NAMES,
)
