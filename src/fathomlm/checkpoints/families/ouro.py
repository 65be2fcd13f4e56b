"""Ouro: layers with norms around each half, run `total_ut_steps` times, an exit after each, one gate for all."""

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
    size,
    write_common,
)
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import UnsupportedModel

OURO_NAMES = {**LLAMA_NAMES, "norm_attn_out": "input_layernorm_2", "norm_mlp_out": "post_attention_layernorm_2"}
LOOPS = 4


def read_ouro(config: Config) -> Architecture:
    if config.flag("use_sliding_window", default=False):
        raise UnsupportedModel("ouro with use_sliding_window is not supported; released models do not set it")
    traits = llama_traits(config, "ouro")
    return Architecture(**{**traits, "layers": traits["layers"] * _loops(config)}, residual="sandwich")


def plan_ouro(config: Config, architecture: Architecture) -> DepthPlan:
    """The final norm stands behind every loop: for the head, the gate, and the next loop."""
    plan = DepthPlan.build("cycle", _loops(config), architecture.layers)
    if plan.recursions == 1:
        raise UnsupportedModel("ouro with one loop has a gate and nothing to exit from; total_ut_steps must be >= 2")
    return plan.with_loop_norm().with_exits(plan.recursion_ends(), gate=True)


def write_ouro(a: Architecture) -> dict[str, Any]:
    """With the rotary base where the published code looks for it."""
    fields = {"hidden_act": HF_ACTIVATIONS[a.activation], "rope_theta": a.rope.theta, "use_sliding_window": False}
    return {**write_common(a), **fields, "total_ut_steps": 1}


def write_loops(a: Architecture, plan: DepthPlan) -> dict[str, Any]:
    unique = dataclasses.replace(a, layers=plan.unique_layers)
    return {**write_ouro(unique), "total_ut_steps": plan.recursions, "early_exit_threshold": 1.0}


def _loops(config: Config) -> int:
    return size(config, "total_ut_steps", "recursions", LOOPS)


OURO = Family(
    model_type="ouro",
    architecture_class="OuroForCausalLM",
    read=read_ouro,
    write=write_ouro,
    layer_names=OURO_NAMES,
    outer_names={**LLAMA_OUTER, "exit_gate": "model.early_exit_gate"},
    plan=plan_ouro,
    write_loops=write_loops,
    exit_gate=True,
)
