"""Random models of a few thousand weights that read bytes, routed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.data.tokenizers import byte_tokenizer
from random_weights import randomise

SHAPE: dict[str, Any] = {"layers": 8, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 2, "head_dim": 8}
TEXT = "".join(f"{n}: the line is {n * 7919 % 1000} fathoms long, é and so on. " for n in range(40))


def model_of(
    router: str | None = "expert",
    *,
    sharing: str = "middle-cycle",
    recursions: int = 3,
    kv: str = "cache",
    relaxation: Relaxation | None = None,
    traits: dict[str, Any] | None = None,
    seed: int = 0,
    **routing: Any,
) -> FathomForCausalLM:
    """A model with random weights, its norms and relaxations included."""
    architecture = Architecture(**{"family": "llama", "vocab": 257, "context": 64, **SHAPE, **(traits or {})})
    plan = DepthPlan.build(sharing, recursions, architecture.layers)
    if router is not None:
        plan = plan.with_routing(build_routing(router, recursions, **routing))
    plan = plan.with_kv(kv)  # type: ignore[arg-type]
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation, dtype=torch.float32))
    randomise(model, seed)
    model.tokenizer = byte_tokenizer()
    return model.eval()


def saved(model: FathomForCausalLM, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def text_file(directory: Path, text: str = TEXT, name: str = "text.txt") -> str:
    (directory / name).write_text(text, encoding="utf-8")
    return str(directory / name)
