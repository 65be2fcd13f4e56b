"""Tiny random encoder-decoder models of the T5 family, written as the directories that people have.

Version 1.1 and mT5 checkpoints have a head of their own. transformers from version 5 on believes the weights in that, not
the configuration, so such a model is made by adding the head to a saved one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, LongT5Config, MT5Config, PreTrainedModel, T5Config

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GATED = {**SHAPE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
LONG = {**GATED, "local_radius": 3}
CONFIGS: dict[str, Any] = {
    "t5": lambda: T5Config(**SHAPE),
    "t5-v1.1": lambda: T5Config(**GATED),
    "flan-t5": lambda: T5Config(**GATED),
    "mt5": lambda: MT5Config(**SHAPE),
    "mt5-untied": lambda: MT5Config(**SHAPE),
    "longt5-local": lambda: LongT5Config(**LONG),
    "longt5-tglobal": lambda: LongT5Config(**LONG, encoder_attention_type="transient-global", global_block_size=4),
}
UNTIED = ("flan-t5", "mt5-untied")


def write_tiny_t5(name: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Save a tiny model of a kind, every tensor random, and return transformers' own reading of the directory."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.4 if "relative" in key else 0.15))
    model.save_pretrained(directory)
    if name in UNTIED:
        _give_a_head(directory)
    return AutoModelForSeq2SeqLM.from_pretrained(directory).eval()


def _give_a_head(directory: Path) -> None:
    """A head of its own, and the configuration as transformers wrote it before version 5."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": torch.randn(96, 32) * 0.18}, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
