"""How much memory a run needs on each device, counted from the shapes before anything is loaded.

Weights, gradients and optimizer state are exact. Activations are what autograd keeps of a pre-norm block in this code,
tensor by tensor; a test holds that count against the real thing. What a compiler fuses away is an estimate.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fathomlm.depth import Step
from fathomlm.depth.cost import running_parts
from fathomlm.train.budget import micro_batch_size, row_length, rows_per_step
from fathomlm.train.encoder_cost import EncoderCost
from fathomlm.train.losses.head import default_chunk
from fathomlm.train.recipe import Recipe
from fathomlm.train.student import StudentSpec, learns

PLANNED = 0.9
"""The part of a device's memory that may be planned for; the rest is the driver's, and lost between blocks."""


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
    """What the backward pass of one micro-batch needs of an encoder, and of the source's keys and values; an estimate."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total": self.total}


def count_memory(recipe: Recipe, parts: StudentSpec, teacher_parameters: int, parallel: str) -> TrainingMemory:
    """The bytes of each kind under `parallel`: none, ddp or fsdp."""
    devices = recipe.hardware.count
    split = devices if parallel == "fsdp" else 1
    tensors = list(parts.tensors())
    learning = [shape for group, shape in tensors if learns(recipe.train, group)]
    total, learned = sum(math.prod(shape) for _, shape in tensors), sum(map(math.prod, learning))
    state = sum(_optimizer_floats(recipe.optimizer.kind, shape) for shape in learning)
    rows = micro_batch_size(rows_per_step(recipe), devices, recipe.batch.micro)
    summed = rows_per_step(recipe) > rows * devices
    gradients = 4 * learned // split + (4 * learned if split > 1 and summed else 0)
    tokens = rows * (row_length(recipe) if parts.encoder is None else recipe.data.target_length)
    return TrainingMemory(
        weights=4 * total // split,
        gradients=gradients,
        optimizer=4 * state // split,
        copies=_copies(recipe, parts, gathered=parallel == "fsdp"),
        teacher=_wide(recipe) * teacher_parameters,
        activations=tokens * activation_bytes(recipe, parts),
        head=_head(recipe, parts, tokens),
        encoder=rows * _encoder(recipe, parts),
    )


def _encoder(recipe: Recipe, parts: StudentSpec) -> int:
    """Of one row: what the encoder keeps, and every step's keys and values of the source."""
    if parts.encoder is None:
        return 0
    S, wide = recipe.data.source_length, _wide(recipe)
    entries = 0 if recipe.exits_only else 2 * parts.architecture.kv_width * parts.plan.unrolled_layers * wide
    kept, recomputed = learns(recipe.train, "encoder"), recipe.recompute == "layer"
    return S * (entries + EncoderCost.of(parts.encoder).activation_bytes(S, wide, kept=kept, recomputed=recomputed))


def activation_bytes(recipe: Recipe, parts: StudentSpec) -> int:
    """Bytes that the layers keep of each token, by what is computed again (`recompute`)."""
    routing = parts.plan.routing
    # Token-choice trains on whole rows: every recursion is computed for every token.
    runs = running_parts(parts.plan) if routing is not None and routing.method.picks_tokens else None
    steps = [
        int(_step_bytes(recipe, parts, step) * (runs[step.recursion] if runs is not None and step.part == "core" else 1))
        for step in parts.plan
    ]
    adapters = sum(_exit_bytes(recipe, parts, index) for index in parts.plan.exits)
    if recipe.exits_only:  # the layers are frozen: nothing is kept but what one of them works on
        return max(steps) + adapters
    if recipe.recompute in ("none", "inner"):
        return sum(steps) + adapters
    segments, run = [], 0
    for step, needed in zip(parts.plan, steps, strict=True):
        run += needed
        last = step.index == parts.plan.unrolled_layers - 1 or step.index in parts.plan.exits
        if last or recipe.recompute == "layer" or parts.plan.is_last_of_recursion(step):
            segments.append(run)
            run = 0
    return max(segments) + _wide(recipe) * parts.architecture.hidden * len(segments) + adapters


def _step_bytes(recipe: Recipe, parts: StudentSpec, step: Step) -> int:
    """What autograd keeps of one step for one token. Norms keep their input in float32 in either precision; in bfloat16
    each linear that reads a norm keeps a rounded copy of its own, which a compiler makes one again."""
    a = parts.architecture
    mixed = recipe.precision == "bf16"
    wide = _wide(recipe)
    norms = 4 if a.residual == "sandwich" else 3 if a.cross else 2
    readers = (5 if a.gated else 4) + a.cross
    attention = wide * (2 * a.query_width + 2 * a.kv_width) + 4 * a.heads
    attention += wide * 2 * a.query_width + 4 * a.heads if a.cross else 0  # its keys and values are the source's
    if recipe.compile:
        relaxed = _relaxed_bytes(parts, step, mixed)
        # The forms with a written-out backward pass keep a half's input, but not its norm (`kernels/half.py`).
        plain = not relaxed and a.residual == "pre" and a.gated and a.activation == "silu" and not a.qk_norm
        thrice = relaxed or (plain and recipe.recompute != "inner")
        inner = a.intermediate * ((3 if thrice else 2) if a.gated else 1)
        return (1 if plain else 2) * norms * wide * a.hidden + attention + wide * inner + relaxed
    stream = norms * ((4 + wide) * a.hidden + 4)
    copies = 2 * readers * a.hidden if mixed else 4 * norms * a.hidden
    head_norms = 8 * (a.query_width + a.kv_width) if a.qk_norm else 0
    inner = wide * a.intermediate * (4 if a.gated else 2)
    return stream + copies + attention + head_norms + inner + _relaxed_bytes(parts, step, mixed)


def _exit_bytes(recipe: Recipe, parts: StudentSpec, index: int) -> int:
    """What autograd keeps of one exit's own layer and adapter, and of the final norm behind them, for one token."""
    wide, hidden, rank = _wide(recipe), parts.architecture.hidden, parts.exits.adapter_rank
    norm = 4 * hidden + 4  # for the gradient of what it reads; a frozen stream wants none
    own = [_step_bytes(recipe, parts, step) for step in parts.plan.exit_steps((index,))]
    layer = sum(own) - (norm if own and recipe.exits_only and not recipe.compile else 0)
    adapter = 2 * wide * (hidden + rank) + (norm if own else 0) if rank else 0
    return layer + adapter + (norm if own or rank else 0)


def _relaxed_bytes(parts: StudentSpec, step: Step, mixed: bool) -> int:
    relaxation = parts.relaxation
    if relaxation is None or step.part == "exit" or not relaxation.sits_on(parts.plan, step):
        return 0
    return relaxation.method.activation_bytes(relaxation, parts.architecture, mixed=mixed)


def _optimizer_floats(kind: str, shape: tuple[int, ...]) -> int:
    """AdamW keeps two moments of everything; Adafactor a row and a column of each matrix, and vectors whole."""
    if kind == "adamw":
        return 2 * math.prod(shape)
    return sum(shape)


def _head(recipe: Recipe, parts: StudentSpec, tokens: int) -> int:
    """Plain cross entropy on a GPU works in the logits' own place; elsewhere, and with a teacher, float32 tensors of a
    chunk's shape meet at the peak beside the logits, of which a compiler leaves two."""
    a, loss = parts.architecture, recipe.loss
    early = parts.at_exits.vocab if loss.exits is not None else 0
    taught = loss.exits is not None and loss.exits.distill is not None
    hidden = (tokens, a.hidden)
    logits = max(_logits(recipe, a.vocab, loss.distill is not None, hidden), _logits(recipe, early, taught, hidden))
    copied = 4 * early * a.hidden if parts.exit_vocab else 0
    learned = 4 * a.vocab * a.hidden if recipe.train == "all" else 0
    kept = learned + 4 * tokens * a.hidden if not recipe.exits_only else 0
    exits = len(parts.plan.exits) * (kept or _frozen_head(parts, tokens))
    return logits + copied + kept + exits


def _logits(recipe: Recipe, vocab: int, taught: bool, hidden: tuple[int, int]) -> int:
    """Of one chunk at one output."""
    if not vocab:
        return 0
    wide, device = _wide(recipe), "cpu" if recipe.device == "cpu" else "cuda"
    with_teacher = wide * 3 if recipe.compile else 2 * wide + 28
    without = wide if device == "cuda" else wide + 16
    chunk = min(recipe.loss.chunk or default_chunk(device, vocab, None if taught else hidden), hidden[0])
    return chunk * vocab * (with_teacher if taught else without)


def _frozen_head(parts: StudentSpec, tokens: int) -> int:
    """Gradients at an exit over a frozen model: a delta on the head makes that of all its rows, and what lies in front of it
    learns from that of the hidden states."""
    a, exits = parts.architecture, parts.exits
    width = a.hidden + exits.head_rank
    reached = exits.head_rank or exits.adapter_rank or exits.layer
    return (4 * parts.at_exits.vocab * width if exits.head_rank else 0) + (4 * tokens * width if reached else 0)


def _copies(recipe: Recipe, parts: StudentSpec, gathered: bool) -> int:
    """Each matrix once in bfloat16, for autocast caches them; fsdp gathers shared layers, embedding and what steps add
    with the whole model, and of the other layers one in use and one on its way."""
    a, plan = parts.architecture, parts.plan
    if recipe.precision != "bf16" and not gathered:
        return 0
    matrices = [(group, math.prod(shape)) for group, shape in parts.tensors() if len(shape) == 2]
    head = a.vocab * a.hidden
    if not gathered:
        return 2 * (sum(size for group, size in matrices if group != "embedding") + head)
    shared = {step.layer for step in plan if plan.is_shared(step)}
    alone = min(2, plan.unique_layers - len(shared))
    others = sum(size for group, size in matrices if group != "base")
    return _wide(recipe) * ((len(shared) + alone) * a.layer_parameters + others)


def _wide(recipe: Recipe) -> int:
    """Bytes of a number that products are computed with."""
    return 2 if recipe.precision == "bf16" else 4
