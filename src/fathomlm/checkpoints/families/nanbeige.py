"""Nanbeige 4.2: Llama's layers, run `num_loops` times, with the final norm between loops."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import Config, Family, llama_traits, rope_dict, size, write_common
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import UnsupportedModel

VARIANTS = (
    "attention_bias", "mlp_bias", "qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers",
    "enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection", "enable_mhc",
    "enable_h_res_identity", "enable_depth_attention",
)  # fmt: skip
"""Switches of the published code that no released checkpoint sets, and that change what a layer computes."""


def read_nanbeige(config: Config) -> Architecture:
    for name in VARIANTS:
        if config.raw(name):
            raise UnsupportedModel(f"nanbeige with {name} is not supported; released models do not set it")
    traits = llama_traits(config, "nanbeige")
    return Architecture(**{**traits, "layers": traits["layers"] * _loops(config)})


def plan_nanbeige(config: Config, architecture: Architecture) -> DepthPlan:
    plan = DepthPlan.build("cycle", _loops(config), architecture.layers)
    skips = config.flag("skip_loop_final_norm", default=False)
    return plan if skips or plan.recursions == 1 else plan.with_loop_norm()


def write_nanbeige(a: Architecture) -> dict[str, Any]:
    """With the rotary base where older readers look for it too."""
    rope = {"rope_theta": a.rope.theta, "rope_scaling": None if a.rope.scaling == "none" else rope_dict(a.rope)}
    return {**write_common(a), **rope, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def write_loops(a: Architecture, plan: DepthPlan) -> dict[str, Any]:
    unique = dataclasses.replace(a, layers=plan.unique_layers)
    return {**write_nanbeige(unique), "num_loops": plan.recursions, "skip_loop_final_norm": not plan.loop_norm}


def _loops(config: Config) -> int:
    return size(config, "num_loops", "recursions", 1)


NANBEIGE = Family(
    model_type="nanbeige",
    architecture_class="NanbeigeForCausalLM",
    read=read_nanbeige,
    write=write_nanbeige,
    plan=plan_nanbeige,
    write_loops=write_loops,
)
