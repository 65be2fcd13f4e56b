"""How much memory a run needs on each device, asked of the student itself before anything is loaded.

Weights, gradients and optimizer state are those of the student's modules on the meta device; what the backward pass needs
is measured (`activations.py`). Only what a head works on for a moment is counted by hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder import build_encoder
from fathomlm.train.activations import activation_bytes, encoder_bytes, working_bytes
from fathomlm.train.losses.exits import early_outputs
from fathomlm.train.losses.head import default_chunk
from fathomlm.train.optim import EXITS, choose_trained, moved_by_muon
from fathomlm.train.recipe import Recipe
from fathomlm.train.schedule import micro_batch_size, row_length, rows_per_step
from fathomlm.train.student import StudentSpec

PLANNED = 0.9
"""The part of a device's memory that may be planned for; the rest is the driver's, and lost between blocks."""
GROUPS = {"embedding": ("embed.", "head."), "relaxation": ("deltas.", "encodings."), "router": ("routers.",), "exits": EXITS}
"""How the names of a decoder's weights begin; all others are its base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on one device."""

    weights: int
    """Float32 master weights; a shard of them under fsdp."""
    gradients: int
    """Float32. fsdp shards them, but sums them whole over the micro-batches of a step."""
    optimizer: int
    copies: int
    """The bfloat16 copies that products are computed with; under fsdp the tensors that are gathered at once."""
    teacher: int
    """The teacher's weights, whole on every device."""
    activations: int
    """What the backward pass of one micro-batch needs."""
    head: int
    """Logits of one chunk with what is computed from them, and the gradients that each output's head passes on."""
    encoder: int = 0
    """What the backward pass of one micro-batch needs of an encoder, and of the source's keys and values."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total": self.total}


@dataclass(frozen=True, slots=True)
class Weight:
    """One of a student's weights."""

    group: str
    """base, embedding, relaxation, router, exits or encoder."""
    shape: tuple[int, ...]
    learns: bool
    of_layer: bool = False
    """A matrix of one of the decoder's layers, which Muon would move."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def student_weights(spec: StudentSpec, train: str) -> list[Weight]:
    """All weights of a student, and whether they learn under `train`."""
    decoder = _on_meta(spec)
    choose_trained(decoder, train)
    found = []
    for name, weight in decoder.named_parameters():
        group = next((group for group, prefixes in GROUPS.items() if name.startswith(prefixes)), "base")
        found.append(Weight(group, tuple(weight.shape), weight.requires_grad, moved_by_muon(name, weight.shape)))
    if spec.encoder is not None:
        with torch.device("meta"):
            encoder = build_encoder(spec.encoder)
        found += [Weight("encoder", tuple(weight.shape), train == "all") for weight in encoder.parameters()]
    return found


@lru_cache(maxsize=1)
def _on_meta(spec: StudentSpec) -> Decoder:
    with torch.device("meta"):
        return spec.build_decoder()


def count_memory(recipe: Recipe, spec: StudentSpec, teacher_parameters: int, parallel: str) -> TrainingMemory:
    """The bytes of each kind under `parallel`: none, ddp or fsdp."""
    devices = recipe.hardware.count
    split = devices if parallel == "fsdp" else 1
    weights = student_weights(spec, recipe.train)
    learned = sum(weight.size for weight in weights if weight.learns)
    state = sum(_optimizer_floats(recipe.optimizer.kind, weight) for weight in weights if weight.learns)
    rows = micro_batch_size(rows_per_step(recipe), devices, recipe.batch.micro)
    summed = rows_per_step(recipe) > rows * devices
    tokens = rows * (row_length(recipe) if spec.encoder is None else recipe.data.target_length)
    return TrainingMemory(
        weights=4 * sum(weight.size for weight in weights) // split,
        gradients=4 * learned // split + (4 * learned if split > 1 and summed else 0),
        optimizer=4 * state // split,
        copies=_copies(recipe, spec, weights, gathered=parallel == "fsdp"),
        teacher=working_bytes(recipe) * teacher_parameters,
        activations=tokens * (activation_bytes(recipe, spec) + _healing_bytes(recipe, spec)),
        head=_head(recipe, spec, tokens),
        encoder=rows * encoder_bytes(recipe, spec),
    )


def _optimizer_floats(kind: str, weight: Weight) -> int:
    """AdamW keeps two moments of everything, Muon one of the matrices it moves; Adafactor a row and a column of each
    matrix, and vectors whole."""
    if kind == "adafactor":
        return sum(weight.shape)
    return weight.size if kind == "muon" and weight.of_layer else 2 * weight.size


def _healing_bytes(recipe: Recipe, spec: StudentSpec) -> int:
    """For each token: the teacher's state for every step, and in float32 how far the student's is from it."""
    if recipe.loss.heal is None:
        return 0
    return spec.plan.unrolled_layers * spec.architecture.hidden * (working_bytes(recipe) + 4)


def _head(recipe: Recipe, spec: StudentSpec, tokens: int) -> int:
    """Plain cross entropy on a GPU works in the logits' own place; elsewhere, and with a teacher, float32 tensors of a
    chunk's shape meet at the peak beside the logits, of which a compiler leaves two."""
    a, loss = spec.architecture, recipe.loss
    early = spec.at_exits.vocab if loss.exits is not None else 0
    taught = loss.exits is not None and loss.exits.distill is not None
    hidden = (tokens, a.hidden)
    logits = max(_logits(recipe, a.vocab, loss.distill is not None, hidden), _logits(recipe, early, taught, hidden))
    copied = 4 * spec.at_exits.head.weights if spec.exit_vocab and early else 0
    learned = 4 * a.head.weights if recipe.train == "all" else 0
    kept = learned + 4 * tokens * a.hidden if not recipe.exits_only else 0
    exits = early_outputs(loss.exits, spec.plan) * (kept or _frozen_head(spec, tokens))
    return logits + copied + kept + exits


def _logits(recipe: Recipe, vocab: int, taught: bool, hidden: tuple[int, int]) -> int:
    """Of one chunk at one output."""
    if not vocab:
        return 0
    wide, device = working_bytes(recipe), "cpu" if recipe.device == "cpu" else "cuda"
    with_teacher = wide * 3 if recipe.compile else 2 * wide + 28
    without = wide if device == "cuda" else wide + 16
    chunk = min(recipe.loss.chunk or default_chunk(device, vocab, None if taught else hidden), hidden[0])
    return chunk * vocab * (with_teacher if taught else without)


def _frozen_head(spec: StudentSpec, tokens: int) -> int:
    """Gradients at an exit over a frozen model: a delta on the head makes that of all its rows, and what lies in front of it
    learns from that of the hidden states."""
    a, exits = spec.architecture, spec.exits
    width = a.hidden + exits.head_rank
    reached = exits.head_rank or exits.adapter_rank or exits.layer or exits.draft
    return (4 * spec.at_exits.vocab * width if exits.head_rank else 0) + (4 * tokens * width if reached else 0)


def _copies(recipe: Recipe, spec: StudentSpec, weights: Sequence[Weight], gathered: bool) -> int:
    """Each matrix once in bfloat16, for autocast caches them; fsdp gathers shared layers, embedding and what steps add
    with the whole model, and of the other layers one in use and one on its way."""
    a, plan = spec.architecture, spec.plan
    if recipe.precision != "bf16" and not gathered:
        return 0
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    if not gathered:
        return 2 * (sum(weight.size for weight in matrices if weight.group != "embedding") + a.head.weights)
    shared = {step.layer for step in plan if plan.is_shared(step)}
    alone = min(2, plan.unique_layers - len(shared))
    others = sum(weight.size for weight in matrices if weight.group != "base")
    return working_bytes(recipe) * ((len(shared) + alone) * a.layer_parameters + others)
