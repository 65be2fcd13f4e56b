"""Huginn, and the recurrent retrofits of Llama and OLMo 2 in its container: a prelude, a core that loops any number of times
and begins each with an injection of the prelude's output, and a coda.

One model type has three kinds of layers, which the configuration tells apart only by what goes with them; the names of the
tensors do. Huginn turns adjacent pairs of a head: its rows of queries and keys are sorted into halves as they are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from fathomlm.checkpoints.families.shared import QKV, Config, Family, Fusion, rope_dict, rope_of, size
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import UnsupportedModel

NAMES = {
    "attn.qkv": "attn.Wqkv", "attn.o": "attn.proj", "mlp.gate_up": "mlp.fc", "mlp.down": "mlp.proj",
    "attn.q_norm": "attn.q_norm", "attn.k_norm": "attn.k_norm", "attn.qk.bias": "attn.qk_bias",
}  # fmt: skip
NORMS = {
    "around": ("norm_attn", "norm_attn_out", "norm_mlp", "norm_mlp_out"),
    "pre": ("norm_attn", "norm_mlp"),
    "post": ("norm_attn_out", "norm_mlp_out"),
}
"""Ours in the order of norm_1, norm_2, ..., by the kind of layer."""
RELEASED = {
    "bias": False, "injection_type": "linear", "nonlin_name": "SiLU", "initial_state_mode": "random", "test_time_noise": 0,
}  # fmt: skip
"""Switches of the published code that change what is computed, and what released checkpoints set."""
LOOPS = 32


def complete(names: Collection[str]) -> dict[str, Any]:
    """What a checkpoint's tensors say of its layers."""
    return {"sandwich_norms": any(n.endswith(".norm_4.weight") for n in names),
            "qk_norm": any(n.endswith(".attn.q_norm.weight") for n in names)}  # fmt: skip


def read_huginn(config: Config) -> Architecture:
    for name, value in RELEASED.items():
        if config.raw(name, value) != value:
            raise UnsupportedModel(f"huginn_raven with {name} other than {value!r} is not supported")
    heads = size(config, "num_attention_heads", "heads", None) or size(config, "n_heads", "heads")
    hidden = size(config, "hidden_size", "hidden", None) or size(config, "n_embd", "hidden")
    init = config.record("init_values", default=None)
    scale = math.sqrt(hidden) if init is None else init.number("embed_scale", default=math.sqrt(hidden))
    # Without weights: only Huginn itself widens its embeddings.
    around = config.flag("sandwich_norms", default=scale != 1.0)
    wide = config.flag("qk_norm", default=False)
    prelude, core, coda = _parts(config)
    context = size(config, "block_size", "context", 4096)
    return Architecture(
        family="huginn",
        layers=prelude + core * _loops(config) + coda,
        hidden=hidden,
        intermediate=size(config, "intermediate_size", "intermediate"),
        heads=heads,
        kv_heads=heads if around else size(config, "num_key_value_heads", "kv_heads", heads),
        head_dim=hidden // heads,
        vocab=size(config, "vocab_size", "vocab"),
        context=context if around else size(config, "max_position_embeddings", "context", context),
        tied_embeddings=config.flag("tie_embeddings", default=True),
        norm_eps=config.number("norm_eps", default=1e-6),
        residual="around" if around else ("post" if wide else "pre"),
        qk_bias=config.flag("qk_bias", default=True),
        qk_norm=wide,
        qk_norm_wide=wide,
        rope=rope_of(config, config.number("rope_base", default=50_000.0)),
        embedding_scale=scale,
    )


def plan_huginn(config: Config, architecture: Architecture) -> DepthPlan:
    """The final norm stands in front of the coda too, but for the retrofits."""
    prelude, _, coda = _parts(config)
    plan = DepthPlan.build("middle-cycle", _loops(config), architecture.layers, ends=(prelude, coda))
    return plan.with_injection(norm=architecture.residual == "around")


def write_huginn(a: Architecture) -> dict[str, Any]:
    """A place for every trait; `write_loops` says how layers are divided."""
    rope = rope_dict(a.rope)
    std = math.sqrt(0.4 / a.hidden)
    return {
        "n_embd": a.hidden, "hidden_size": a.hidden, "n_heads": a.heads, "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads, "head_dim": a.head_dim, "intermediate_size": a.intermediate,
        "vocab_size": a.vocab, "padded_vocab_size": a.vocab, "block_size": a.context, "max_position_embeddings": a.context,
        "tie_embeddings": a.tied_embeddings, "norm_eps": a.norm_eps, "qk_bias": a.qk_bias, "qk_norm": a.qk_norm,
        "sandwich_norms": a.residual == "around", "rope_base": a.rope.theta, "rope_theta": a.rope.theta,
        "rope_scaling": None if a.rope.scaling == "none" else rope,
        "init_values": {"std": std, "embedding": std, "embed_scale": a.embedding_scale}, **RELEASED,
        "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": a.layers - 2, "n_layers_in_coda": 1, "mean_recurrence": 1,
    }  # fmt: skip


def write_loops(a: Architecture, plan: DepthPlan) -> dict[str, Any]:
    prelude, coda = plan.ends
    parts = {"n_layers_in_prelude": prelude, "n_layers_in_recurrent_block": plan.core_layers, "n_layers_in_coda": coda}
    return {**write_huginn(a), **parts, "n_layers": plan.unique_layers, "mean_recurrence": plan.recursions}


def variant(family: Family, a: Architecture, plan: DepthPlan) -> Family:
    """The names that a kind of layer has, and where the parts lie."""
    norms = {ours: f"norm_{i}" for i, ours in enumerate(NORMS[a.residual], start=1)}
    prelude, coda = plan.ends
    sections = (("transformer.prelude", prelude), ("transformer.core_block", plan.core_layers), ("transformer.coda", coda))
    return dataclasses.replace(
        family, layer_names={**NAMES, **norms}, sections=sections, adjacent_pairs=a.residual == "around"
    )


def _parts(config: Config) -> tuple[int, int, int]:
    names = ("prelude", "recurrent_block", "coda")
    prelude, core, coda = (size(config, f"n_layers_in_{name}", "layers") for name in names)
    return prelude, core, coda


def _loops(config: Config) -> int:
    return size(config, "mean_recurrence", "recursions", LOOPS)


HUGINN = Family(
    model_type="huginn_raven",
    architecture_class="RavenForCausalLM",
    read=read_huginn,
    write=write_huginn,
    complete=complete,
    outer_names={
        "embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head", "inject": "transformer.adapter",
    },
    plan=plan_huginn,
    write_loops=write_loops,
    variant=variant,
    injection=True,
    fusions=(Fusion("attn.qk", ("attn.q", "attn.k"), end="bias"), QKV, Fusion("mlp.gate_up", ("mlp.gate", "mlp.up"))),
)  # fmt: skip
