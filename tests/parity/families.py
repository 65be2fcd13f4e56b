"""Tiny random Hugging Face models of every family, with all weights random (norms and biases too).

Fresh Hugging Face models have norms of one and biases of zero, which would hide a norm in the wrong place.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "llama-tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-wide-head": lambda: LlamaConfig(**GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen2-window": lambda: Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=3),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=5, query_pre_attn_scalar=24),
    "neox": lambda: GPTNeoXConfig(**SHAPE, rotary_pct=0.25),
    "qwen3-yarn": lambda: Qwen3Config(**GROUPED, head_dim=16, rope_parameters=YARN),
    "smollm3": lambda: SmolLM3Config(**GROUPED, use_sliding_window=False),
    "smollm3-window": lambda: SmolLM3Config(
        **GROUPED,
        no_rope_layers=[1, 0, 1, 1, 0, 1],
        use_sliding_window=True,
        sliding_window=5,
    ),
    "granite": lambda: GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=0.5,
    ),
    "phi3": lambda: Phi3Config(**GROUPED, sliding_window=None),
    "phi4-mini": lambda: Phi3Config(
        **GROUPED,
        head_dim=8,
        sliding_window=None,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE,
    ),
    "olmo2": lambda: Olmo2Config(**GROUPED),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **GROUPED, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "qwen3-moe-parts": lambda: Qwen3MoeConfig(
        **GROUPED, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=3, norm_topk_prob=False
    ),
    "neox-sequential": lambda: GPTNeoXConfig(**SHAPE, use_parallel_residual=False, rotary_pct=0.5),
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of a family, in float32, every tensor random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "embed" in key else 0.18))
    return model
