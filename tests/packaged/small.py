"""A random routed model of a few thousand weights, stored as a packaged model is: int8 in several files, a tokenizer, a card
and a record."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.native import save
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from random_weights import randomise

SHAPE: dict[str, Any] = {"layers": 8, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}


def write_packaged(directory: Path, tokenizer: Any) -> Path:
    architecture = Architecture(family="llama", vocab=len(tokenizer), context=256, tied_embeddings=True, **SHAPE)
    plan = DepthPlan.build("middle-cycle", 3, architecture.layers).with_routing(build_routing("expert", 3))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, dtype=torch.float32, **ids)).eval()
    randomise(model)
    model.tokenizer = copy.deepcopy(tokenizer)
    model.tokenizer.chat_template = None  # it continues texts and was not made for chat
    save(model, directory, quantize="int8", shard_bytes=20_000)
    (directory / "README.md").write_text("# tiny-mor\n\nLicence: CC0. Loss: 5.00.\n", encoding="utf-8")
    record = {"held_out_loss": 5.0, "causal_loss": 5.0, "top_k_loss": 5.0}
    (directory / "record.json").write_text(json.dumps(record), encoding="utf-8")
    return directory
