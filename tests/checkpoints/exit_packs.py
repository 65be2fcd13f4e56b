"""Small models with exits, and packs that somebody damages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.exit_models import GEMMA3, LLAMA, LOOP, LORA, PROMPTS, VANILLA
from fathomlm.checkpoints import exit_pack
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.exit_pack import RECORD, WEIGHTS
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from random_weights import randomise

EVERY = {"exit_rank": 3, "exit_adapter": 4, "exit_classifier": True}
KINDS: dict[str, tuple[Architecture, DepthPlan, Relaxation | None, dict[str, Any]]] = {
    "adapter": (LLAMA, VANILLA.with_exits([2]), None, {"exit_adapter": 4}),
    "layer": (LLAMA, VANILLA.with_exits([2], layer=True), None, {}),
    "head": (LLAMA, VANILLA.with_exits([2]), None, {"exit_rank": 3}),
    "classifier": (LLAMA, VANILLA.with_exits([2]), None, {"exit_classifier": True}),
    "nothing": (LLAMA, VANILLA.with_exits([2]), None, {}),
    "every": (LLAMA, VANILLA.with_exits([2], layer=True), None, EVERY),
    "two": (GEMMA3, VANILLA.with_exits([1, 3], layer=True), None, EVERY),
    "looped": (LLAMA, LOOP.with_exits(LOOP.recursion_ends(), layer=True), LORA, EVERY),
}


def build(kind: str, seed: int = 0) -> FathomForCausalLM:
    """Random weights everywhere, in exits too, so that nothing is what a fresh model would have."""
    architecture, plan, relaxation, parts = KINDS[kind]
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation, dtype=torch.float32, **parts)).eval()
    randomise(model, seed, std=lambda name: 0.06 if name.endswith(("o.weight", "down.weight")) else 0.2)
    return model


def bare(model: Any) -> Any:
    """The same model without its exits."""
    return replan(model, model.plan.with_exits(()))


def weights(model: Any) -> dict[str, Tensor]:
    return dict(model.decoder.named_parameters())


def said(model: Any, mode: str, **options: Any) -> list[tuple[int, ...]]:
    exit = model.plan.exits[0] + 1
    exiting = None if mode == "full" else Exiting(mode=mode, exit_layers=(exit,), **options)  # type: ignore[arg-type]
    return [row.tokens for row in generate(model, PROMPTS, max_new_tokens=6, exiting=exiting)]


def rewrite(pack: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Other tensors with a right checksum: what somebody else's writer may get wrong."""
    tensors = load_file(pack / WEIGHTS)
    change(tensors)
    save_file(tensors, pack / WEIGHTS)
    edit(pack, sha256=exit_pack._digest((pack / WEIGHTS).read_bytes()))


def edit(pack: Path, **changes: Any) -> None:
    record = json.loads((pack / RECORD).read_text())
    for path, value in changes.items():
        *outer, name = path.split("__")
        place = record
        for each in outer:
            place = place[each]
        place[name] = value
        if value is ...:
            del place[name]
    (pack / RECORD).write_text(json.dumps(record))
