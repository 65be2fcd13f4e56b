"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    activation_of,
    common,
    rope_of,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture


def _qwen_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen: a window only if use_sliding_window says so, and then from layer max_window_layers on."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return ()
    first = int(config.get("max_window_layers", 28))
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows_of({"layer_types": kinds, **{k: v for k, v in config.items() if v is not None}}, layers)


def read_qwen2(config: Config) -> Architecture:
    shape = common(config)
    return Architecture(
        family="qwen2",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation_of(config.get("hidden_act", "silu"), "qwen2"),
        qkv_bias=True,
        rope=rope_of(config),
        windows=_qwen_windows(config, shape["layers"]),
    )


def read_qwen3(config: Config) -> Architecture:
    shape = {**common(config), "head_dim": int(config.get("head_dim") or 128)}
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        family="qwen3",
        **shape,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation_of(config.get("hidden_act", "silu"), "qwen3"),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        rope=rope_of(config),
        windows=_qwen_windows(config, shape["layers"]),
    )


def write_qwen(a: Architecture) -> dict[str, Any]:
    bias = {"attention_bias": a.qkv_bias} if a.family == "qwen3" else {}
    windows = {**write_windows(a), "use_sliding_window": bool(a.windows)}
    return {**write_common(a), "hidden_act": HF_ACTIVATIONS[a.activation], **bias, **windows}
