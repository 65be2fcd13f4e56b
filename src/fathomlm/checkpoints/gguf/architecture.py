"""What a GGUF file's metadata say of its architecture.

Keys follow llama.cpp's converter. What would change a layer's arithmetic in a way that no block here has is an error: a
model that runs wrongly is worse than one that does not run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.depth import Architecture, DepthPlan, Rope
from fathomlm.errors import CheckpointError, OptionError, PlanError, UnsupportedModel, is_number
from fathomlm.fields import REQUIRED, Fields

_REFUSED = (
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Metadata that change what a layer computes; nought means that the file does not use it."""
_USED = {"granite": ("logit_scale", "residual_scale", "embedding_scale"), "qwen3moe": ("expert_count",)}
"""Those of them that an architecture has a block for here."""


SIZES = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "intermediate": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "context": "context_length",
}
"""llama.cpp's keys for the sizes of an architecture."""


class _Facts(Fields):
    """The metadata of one architecture, by key and of the type that is asked for."""

    __slots__ = ("file",)

    def __init__(self, file: GGUFFile, name: str) -> None:
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(own, str(file.path), error=CheckpointError, prefix=prefix)
        self.file = file

    def whole(self, key: str, default: int = REQUIRED) -> int:
        """An integer; a list with one value for every layer stands for that value."""
        value = self.raw(key)
        if not isinstance(value, list) or not value:
            return self.integer(key, default=default)
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{self.where}: {key} differs from layer to layer")
        return self.replaced({key: value[0]}).integer(key)

    def positive(self, key: str, default: float = REQUIRED) -> float:
        value = self.raw(key, default)
        if not is_number(value) or value <= 0:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def read_architecture(file: GGUFFile) -> tuple[Architecture, DepthPlan]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: the metadata names no architecture")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{file.path}: holds a GGUF {kind!r}, not a model")
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(f"{file.path}: GGUF architecture {name!r} is not supported; supported: {known}")
    facts = _Facts(file, name)
    if (parts := file.metadata.get("split.count")) not in (None, 0, 1):
        raise UnsupportedModel(f"{file.path}: one of {parts} parts; join them first (llama-gguf-split --merge)")
    for key in _REFUSED:
        if facts.raw(key) and key not in _USED.get(name, ()):
            raise UnsupportedModel(f"{file.path}: {name}.{key} is set, which is not supported")
    layers = facts.whole(SIZES["layers"])
    blocks = {match[1] for tensor in file.tensors if (match := re.match(r"blk\.(\d+)\.", tensor))}
    if layers != len(blocks):
        raise CheckpointError(
            f"{file.path}: {name}.block_count is {layers:,}, but there are tensors of {len(blocks)} layers"
        )
    try:
        architecture = _FAMILIES[name](facts)
        return architecture, _plan(facts, architecture)
    except (OptionError, PlanError) as error:
        raise CheckpointError(f"{file.path}: invalid metadata: {error}") from error


def _common(facts: _Facts, norm: str = "layer_norm_rms_epsilon", partial_rotary: bool = False) -> dict[str, Any]:
    """The traits that every family writes under the same keys."""
    path = facts.file.path
    embedding = facts.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: incomplete: it has no table of token embeddings (token_embd.weight)")
    hidden, heads = facts.whole(SIZES["hidden"]), facts.whole(SIZES["heads"])
    if heads < 1:
        raise facts.wrong(SIZES["heads"], "> 0")
    usual = {"kv_heads": heads, "head_dim": hidden // heads}
    sizes = {field: facts.whole(key, usual.get(field, REQUIRED)) for field, key in SIZES.items()}
    head_dim = sizes["head_dim"]
    rotary_dim = facts.whole("rope.dimension_count", head_dim)
    if facts.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{path}: a head's keys and values differ in width, which is not supported")
    if not 0 < rotary_dim <= head_dim or (rotary_dim != head_dim and not partial_rotary):
        raise UnsupportedModel(f"{path}: rope.dimension_count is {rotary_dim}, but each head has {head_dim}")
    return {
        **sizes,
        "rotary_fraction": rotary_dim / head_dim,
        "vocab": embedding.shape[0],
        "tied_embeddings": not facts.has("output.weight"),
        "norm_eps": _decimal(facts.positive(f"attention.{norm}")),
        "rope": _rope(facts, head_dim),
        "attention_scale": _decimal(facts.positive("attention.scale")) if facts.raw("attention.scale") else None,
    }


def _llama(facts: _Facts, family: str = "llama") -> Architecture:
    window = facts.whole("attention.sliding_window", 0)
    traits = _common(facts)
    if window and window < traits["context"]:
        if family != "llama":
            raise UnsupportedModel(f"{facts.file.path}: a {family} model with a sliding window is not supported")
        traits |= {"windows": (window,) * traits["layers"]}
        family = "mistral"
    return Architecture(
        family=family,
        qkv_bias=facts.has("blk.0.attn_q.bias"),
        o_bias=facts.has("blk.0.attn_output.bias"),
        mlp_bias=facts.has("blk.0.ffn_up.bias"),
        qk_norm=family == "qwen3",
        **traits,
    )


def _smollm3(facts: _Facts) -> Architecture:
    """Every fourth layer has no rotary positions: llama.cpp knows no other pattern."""
    found = _llama(facts, "smollm3")
    rotated = tuple((i + 1) % 4 != 0 for i in range(found.layers))
    return dataclasses.replace(found, rotated=() if all(rotated) else rotated)


def _granite(facts: _Facts) -> Architecture:
    return dataclasses.replace(
        _llama(facts, "granite"),
        embedding_scale=_decimal(facts.positive("embedding_scale", 1.0)),
        residual_scale=_decimal(facts.positive("residual_scale", 1.0)),
        head_scale=1 / _decimal(facts.positive("logit_scale", 1.0)),
    )


def _olmo2(facts: _Facts) -> Architecture:
    found = _llama(facts, "olmo2")
    if found.tied_embeddings or found.query_width != found.hidden:
        raise UnsupportedModel(f"{facts.file.path}: olmo2 requires a head of its own, and heads as wide as the model")
    return dataclasses.replace(found, residual="post", qk_norm=True, qk_norm_wide=True)


def _qwen3_moe(facts: _Facts) -> Architecture:
    traits = _common(facts) | {"intermediate": facts.whole("expert_feed_forward_length")}
    bias = facts.has("blk.0.attn_q.bias")
    return Architecture(
        family="qwen3_moe",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=facts.whole("expert_count"),
        experts_per_token=facts.whole("expert_used_count"),
        experts_normed=True,
        **traits,
    )


def _gemma(facts: _Facts) -> Architecture:
    traits = _common(facts)
    return Architecture(
        family="gemma", norm="rms_plus_one", activation="gelu_tanh", embedding_scale=traits["hidden"] ** 0.5, **traits
    )


def _gemma3(facts: _Facts) -> Architecture:
    traits = _common(facts)
    window = facts.whole("attention.sliding_window")
    # As llama.cpp has it: the 27B model, known by its 62 layers, is the one that does not scale by its head size.
    scale_width = traits["hidden"] / traits["heads"] if traits["layers"] == 62 else traits["head_dim"]
    traits |= {"attention_scale": traits["attention_scale"] or scale_width**-0.5}
    return Architecture(
        family="gemma3",
        norm="rms_plus_one",
        activation="gelu_tanh",
        residual="sandwich",
        qk_norm=True,
        local_rope=Rope(theta=facts.positive("rope.freq_base_swa", 10_000.0)),
        windows=tuple(None if (i + 1) % 6 == 0 else window for i in range(traits["layers"])),
        embedding_scale=traits["hidden"] ** 0.5,
        **traits,
    )


def _neox(facts: _Facts) -> Architecture:
    return Architecture(
        family="neox",
        norm="layer",
        activation="gelu",
        gated=False,
        residual="pre" if facts.raw("use_parallel_residual") is False else "parallel",
        qkv_bias=facts.has("blk.0.attn_qkv.bias"),
        o_bias=facts.has("blk.0.attn_output.bias"),
        mlp_bias=True,
        **_common(facts, norm="layer_norm_epsilon", partial_rotary=True),
    )


def _nanbeige(facts: _Facts) -> Architecture:
    traits = _common(facts)
    return Architecture(family="nanbeige", **{**traits, "layers": traits["layers"] * facts.whole("num_loops", 1)})


def _plan(facts: _Facts, architecture: Architecture) -> DepthPlan:
    loops = facts.whole("num_loops", 1) if architecture.family == "nanbeige" else 1
    plan = DepthPlan.build("cycle", loops, architecture.layers)
    return plan if loops == 1 or facts.raw("skip_loop_final_norm") else plan.with_loop_norm()


_FAMILIES: dict[str, Callable[[_Facts], Architecture]] = {
    "llama": _llama,
    "qwen2": functools.partial(_llama, family="qwen2"),
    "qwen3": functools.partial(_llama, family="qwen3"),
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "gemma": _gemma,
    "gemma3": _gemma3,
    "gptneox": _neox,
    "nanbeige": _nanbeige,
}


def _rope(facts: _Facts, head_dim: int) -> Rope:
    theta = facts.positive("rope.freq_base", 10_000.0)
    kind = facts.raw("rope.scaling.type")
    factor = facts.positive("rope.scaling.factor", facts.positive("rope.scale_linear", 1.0))
    if kind not in (None, "none", "linear"):
        raise UnsupportedModel(f"{facts.file.path}: unknown rotary scaling {kind!r:.40}; known: none, linear, llama3")
    if facts.has("rope_freqs.weight"):
        return _llama3_rope(facts.file, theta, head_dim)
    return Rope(theta=theta) if kind == "none" or factor == 1 else Rope(theta=theta, scaling="linear", factor=factor)


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> Rope:
    """Llama 3's scaling, which a GGUF file holds only as the table of divisors that it leads to.

    All of Meta's models, and so llama.cpp's converter, use the low and high factors 1 and 4 at 8192 positions; only
    `factor` differs, and it is the divisor of the slowest frequency.
    """
    table = file.tensor("rope_freqs.weight")
    if table.numel() != head_dim // 2:
        raise CheckpointError(f"{file.path}: rope_freqs.weight has {table.numel()} values, not {head_dim // 2}")
    if bool((table == 1).all()):
        return Rope(theta=theta)
    rope = Rope(theta=theta, scaling="llama3", factor=float(table.max()))
    if not torch.allclose(table.double(), divisors_llama3(rope, head_dim), rtol=1e-4):
        raise UnsupportedModel(f"{file.path}: rope_freqs.weight is not Llama 3's rotary scaling; no other is known")
    return rope


def divisors_llama3(rope: Rope, rotary_dim: int) -> torch.Tensor:
    """What Llama 3's scaling divides each frequency by."""
    wavelengths = 2 * math.pi * rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = ((rope.original_context / wavelengths - rope.low_freq_factor) / span).clamp(0, 1)
    return 1 / ((1 - smooth) / rope.factor + smooth)


def _decimal(value: float) -> float:
    """The decimal that was written: metadata are float32, so that 1e-5 comes back as 9.999999747378752e-06."""
    return float(f"{value:.7g}")
