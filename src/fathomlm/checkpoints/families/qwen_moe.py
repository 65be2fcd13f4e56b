"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.qwen import read_qwen3, write_qwen
from fathomlm.checkpoints.families.shared import LLAMA_NAMES, Config, Family, size
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

NAMES = LLAMA_NAMES | {
    "mlp.router": "mlp.gate",
    "mlp.gate": "mlp.experts.*.gate_proj",
    "mlp.up": "mlp.experts.*.up_proj",
    "mlp.down": "mlp.experts.*.down_proj",
}
"""A * stands for the number of an expert: ours are one tensor."""


def read_qwen3_moe(config: Config) -> Architecture:
    if config.raw("mlp_only_layers") or config.integer("decoder_sparse_step", at_least=0, default=1) != 1:
        raise UnsupportedModel(
            "qwen3_moe with layers that have no experts (mlp_only_layers, decoder_sparse_step) has no block here"
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


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture_class="Qwen3MoeForCausalLM",
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    layer_names=NAMES,
)
