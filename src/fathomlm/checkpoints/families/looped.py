"""Llama's layers in a loop: Nanbeige 4.2, with the final norm between loops, and Ouro, with norms around each half, an exit
after each loop, and one gate for all."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    LLAMA_OUTER,
    Config,
    Family,
    llama_traits,
    rope_dict,
    size,
    write_common,
)
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import UnsupportedModel

VARIANTS = (
    "attention_bias", "mlp_bias", "qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers",
    "enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection", "enable_mhc",
    "enable_h_res_identity", "enable_depth_attention",
)  # fmt: skip
"""Switches of Nanbeige's published code that no released checkpoint sets, and that change what a layer computes."""
OURO_NAMES = {**LLAMA_NAMES, "norm_attn_out": "input_layernorm_2", "norm_mlp_out": "post_attention_layernorm_2"}


def _read(config: Config, family: str, refused: tuple[str, ...], loops: int) -> Architecture:
    for name in refused:
        if config.raw(name):
            raise UnsupportedModel(f"{family} with {name} is not supported; released models do not set it")
    traits = llama_traits(config, family)
    return Architecture(**{**traits, "layers": traits["layers"] * loops})


def _once(a: Architecture, plan: DepthPlan) -> Architecture:
    """Formats with loops name the layers that they store."""
    return dataclasses.replace(a, layers=plan.unique_layers)


def nanbeige_loops(config: Config) -> int:
    return size(config, "num_loops", "recursions", 1)


def read_nanbeige(config: Config) -> Architecture:
    return _read(config, "nanbeige", VARIANTS, nanbeige_loops(config))


def plan_nanbeige(config: Config, architecture: Architecture) -> DepthPlan:
    plan = DepthPlan.build("cycle", nanbeige_loops(config), architecture.layers)
    skips = config.flag("skip_loop_final_norm", default=False)
    return plan if skips or plan.recursions == 1 else plan.with_loop_norm()


def write_nanbeige(a: Architecture) -> dict[str, Any]:
    """With the rotary base where older readers look for it too."""
    rope = {"rope_theta": a.rope.theta, "rope_scaling": None if a.rope.scaling == "none" else rope_dict(a.rope)}
    return {**write_common(a), **rope, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def write_nanbeige_loops(a: Architecture, plan: DepthPlan) -> dict[str, Any]:
    loops = {"num_loops": plan.recursions, "skip_loop_final_norm": not plan.loop_norm}
    return {**write_nanbeige(_once(a, plan)), **loops}


def ouro_loops(config: Config) -> int:
    return size(config, "total_ut_steps", "recursions", 4)


def read_ouro(config: Config) -> Architecture:
    found = _read(config, "ouro", ("use_sliding_window",), ouro_loops(config))
    return dataclasses.replace(found, residual="sandwich")


def plan_ouro(config: Config, architecture: Architecture) -> DepthPlan:
    """The final norm stands behind every loop: for the head, the gate, and the next loop."""
    plan = DepthPlan.build("cycle", ouro_loops(config), architecture.layers)
    if plan.recursions == 1:
        raise UnsupportedModel("ouro with one loop has a gate and nothing to exit from; total_ut_steps must be >= 2")
    return plan.with_loop_norm().with_exits(plan.recursion_ends(), gate=True)


def write_ouro(a: Architecture) -> dict[str, Any]:
    """With the rotary base where the published code looks for it."""
    fields = {"hidden_act": HF_ACTIVATIONS[a.activation], "rope_theta": a.rope.theta, "use_sliding_window": False}
    return {**write_common(a), **fields, "total_ut_steps": 1}


def write_ouro_loops(a: Architecture, plan: DepthPlan) -> dict[str, Any]:
    return {**write_ouro(_once(a, plan)), "total_ut_steps": plan.recursions, "early_exit_threshold": 1.0}


NANBEIGE = Family(
    model_type="nanbeige",
    architecture_class="NanbeigeForCausalLM",
    read=read_nanbeige,
    write=write_nanbeige,
    plan=plan_nanbeige,
    write_loops=write_nanbeige_loops,
)
OURO = Family(
    model_type="ouro",
    architecture_class="OuroForCausalLM",
    read=read_ouro,
    write=write_ouro,
    layer_names=OURO_NAMES,
    outer_names={**LLAMA_OUTER, "exit_gate": "model.early_exit_gate"},
    plan=plan_ouro,
    write_loops=write_ouro_loops,
    exit_gate=True,
)
