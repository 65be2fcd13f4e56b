"""Phi 3 and Phi-4-mini: Llama's layers with joined matrices, a part of each head rotated, and LongRoPE.

LongRoPE has two sets of factors, and a sequence that grows past the original context would turn all its earlier keys anew.
Here a model is read with the original context and its factors.
"""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    LLAMA_NAMES,
    QKV,
    Config,
    Family,
    Fusion,
    llama_traits,
    size,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

GATE_UP = Fusion("mlp.gate_up", ("mlp.gate", "mlp.up"))
PHI_NAMES = {**LLAMA_NAMES, "attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"}


def read_phi(config: Config) -> Architecture:
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name, default=False):
            raise UnsupportedModel(f"phi3 with {name} is not supported")
    traits = llama_traits(_with_original(config), "phi3")
    parameters = config.record("rope_parameters", default=None)
    fraction = config.number("partial_rotary_factor", default=1.0)
    fraction = parameters.number("partial_rotary_factor", default=fraction) if parameters else fraction
    if traits["rope"].scaling == "longrope":
        traits["context"] = min(traits["context"], traits["rope"].original_context)
    return Architecture(**traits, rotary_fraction=fraction, windows=windows_of(config, traits["layers"]))


def _with_original(config: Config) -> Config:
    """Older configurations name the original context beside the rotary fields."""
    original = size(config, "original_max_position_embeddings", "original_context", None)
    for name in ("rope_parameters", "rope_scaling"):
        found = config.raw(name)
        if original is not None and isinstance(found, dict) and "original_max_position_embeddings" not in found:
            config = config.replaced({name: {**found, "original_max_position_embeddings": original}})
    return config


def write_phi(a: Architecture) -> dict[str, Any]:
    """A window is for all layers, as the format has it."""
    common = write_common(a)
    common["rope_parameters"] |= {"partial_rotary_factor": a.rotary_fraction}
    original = {"original_max_position_embeddings": a.rope.original_context if a.rope.scaling == "longrope" else a.context}
    window = write_windows(a)["sliding_window"]
    return {**common, **original, "hidden_act": HF_ACTIVATIONS[a.activation], "sliding_window": window,
            "partial_rotary_factor": a.rotary_fraction}  # fmt: skip


PHI3 = Family(
    model_type="phi3",
    architecture_class="Phi3ForCausalLM",
    read=read_phi,
    write=write_phi,
    layer_names=PHI_NAMES,
    fusions=(QKV, GATE_UP),
)
