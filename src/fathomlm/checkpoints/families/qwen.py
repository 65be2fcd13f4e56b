"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    Family,
    llama_traits,
    size,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture


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


QWEN2 = Family(model_type="qwen2", architecture_class="Qwen2ForCausalLM", read=read_qwen2, write=write_qwen)
QWEN3 = Family(model_type="qwen3", architecture_class="Qwen3ForCausalLM", read=read_qwen3, write=write_qwen)
