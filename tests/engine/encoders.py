"""Small encoder-decoder models with random weights under any plan."""

from __future__ import annotations

from typing import Any

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.model.encoder import encoder_record
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomSeq2SeqConfig
from random_weights import randomise

SHAPE: dict[str, Any] = {
    "family": "t5", "hidden": 16, "intermediate": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "vocab": 24, "context": 64,
    "activation": "relu", "gated": False, "rotary_fraction": 0.0, "attention_scale": 1.0, "positions": "relative",
    "relative_buckets": 8, "relative_distance": 20, "cross": True, "memory_width": 16, "tied_embeddings": False,
}  # fmt: skip
ENCODER = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
LINEARS = Architecture(layers=1, **SHAPE).linears()


def encoder_model(plan: DepthPlan, relaxation: Relaxation | None = None, seed: int = 5, **shape: Any) -> FathomForSeq2SeqLM:
    architecture = Architecture(layers=plan.unrolled_layers, **SHAPE | shape)
    config = FathomSeq2SeqConfig.of(
        architecture, plan, relaxation, dtype=torch.float32, encoder_config=encoder_record(ENCODER),
        decoder_start_token_id=0, eos_token_id=3,
    )  # fmt: skip
    made = FathomForSeq2SeqLM(config).eval()
    randomise(made, seed)
    return made
