"""What a run will be, before it starts: its model, its length, its compute, its memory and its time.

Compute is stated twice. "As the thesis counts" is the forward pass without embedding and head (appendix "FLOPs
approximated calculation of Transformers"), tripled for the backward pass. "6 x parameters x tokens", with looped layers
counted per use and the head once, is what the field states utilisation (MFU) against, and so do we.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count, running_parts
from fathomlm.errors import OptionError
from fathomlm.train.budget import forward_flops_per_token, micro_batch_size, plan_steps, row_length, rows_per_step
from fathomlm.train.encoder_cost import EncoderCost, cross_weights, over_both
from fathomlm.train.footprint import PLANNED, TrainingMemory, count_memory
from fathomlm.train.hardware import Rates, accelerator_name, memory_bytes
from fathomlm.train.recipe import Recipe
from fathomlm.train.schedule import LearningRate
from fathomlm.train.student import StudentSpec, learns, read_source, read_student, yet_to_come

ASSUMED = 0.4
"""The part of what a device sustains that a run is assumed to reach; of its data sheet where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run in numbers."""

    name: str
    source_from: str | None
    """The shipped recipe that has yet to make the model's source, which was taken as that recipe says."""
    layout: str
    """Unique layers as the thesis writes them: "15", or "1+10+1" with a prelude and a coda."""
    recursions: int
    unique_layers: int
    unrolled_layers: int
    router: str | None
    """expert or token."""
    exits: tuple[int, ...]
    """Where losses are taken early, as numbers of steps run before leaving."""
    non_embedding_parameters: int
    """The relaxation included, as the thesis' tables have it."""
    embedding_parameters: int
    relaxation_parameters: int
    exit_parameters: int
    """What exits add: to the head, adapters, classifiers."""
    encoder_parameters: int
    """Of the encoder, which the non-embedding parameters leave out."""
    total_parameters: int
    trainable_parameters: int
    forward_flops_per_token: int
    """As the thesis counts: without embedding and head."""
    flops_per_token_6n: int
    steps: int | None
    """None, as all that follows from it, where a budget in epochs waits for data that are not prepared."""
    warmup_steps: int | None
    rows_per_step: int
    tokens_per_step: int
    rows: int | None
    tokens: int | None
    micro_batches: int
    """Forward passes that one device makes in a step."""
    forward_flops: float | None
    """Forward FLOPs x tokens: how the thesis states a budget."""
    training_flops: float | None
    """Three times that: with the backward pass."""
    model_flops: float | None
    """6 x parameters x tokens."""
    work_flops: float | None
    """What the devices compute in products: with exits' heads, teacher and recomputation, less what is frozen."""
    gpu: str | None
    devices: int
    parallel: str
    """none, ddp or fsdp."""
    memory: TrainingMemory
    """On one device."""
    device_memory: int | None
    fits: bool | None
    """Whether that fits into nine tenths of the device's memory; None where the device is not known."""
    peak_tflops: float | None
    """Of one device by its data sheet, or by the recipe."""
    sustained_tflops: float | None
    """Of one device on large products, where somebody has measured it."""
    mfu: float
    """The part of the peak that `seconds` assumes."""
    mfu_sustained: float | None
    """The part of the sustained rate that this is."""
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return record | {"exits": list(self.exits), "memory": self.memory.to_dict()}


def estimate(
    recipe: Recipe, *, rows_in_epoch: int | None = None, device_name: str | None = None, assumed: float = ASSUMED
) -> Estimate:
    """The run that a recipe asks for, from configurations alone: no weights and no data are read.

    Without `rows_in_epoch` the length of a budget in epochs is left open; `device_name` is what the driver calls the device
    that is there, for recipes that name none. `assumed` is the part of what a device sustains that the run reaches; of its
    data sheet where nobody has measured that.
    """
    if not 0 < assumed <= 1:
        raise OptionError(f"the assumed part of the peak must be > 0 and <= 1, got {assumed}")
    parts = read_student(recipe, foresee=True)
    architecture, plan, relaxation = parts.architecture, parts.plan, parts.relaxation
    teacher = None if recipe.loss.distill is None else read_source(recipe.loss.distill.source, foresee=True)
    cost = count(architecture, plan, relaxation=relaxation, context=row_length(recipe))
    steps = None
    if recipe.budget.epochs is None or rows_in_epoch is not None:
        steps = plan_steps(recipe, architecture, plan, relaxation, rows_in_epoch, parts.encoder).steps
    rows = rows_per_step(recipe)
    tokens = None if steps is None else steps * rows * row_length(recipe)
    forward = forward_flops_per_token(recipe, architecture, plan, relaxation, parts.encoder)
    sizes = dict.fromkeys(("base", "embedding", "encoder", "relaxation", "router", "balance", "exits"), 0)
    for group, shape in parts.tensors():
        sizes[group] += math.prod(shape)
    assert sizes["base"] + sizes["relaxation"] + sizes["router"] + sizes["balance"] == cost.non_embedding_parameters, (
        "two counts of one model disagree"
    )
    trainable = sum(size for group, size in sizes.items() if learns(recipe.train, group))
    limit, rates = memory_bytes(recipe.hardware, device_name), Rates.of(recipe.hardware, device_name)
    mfu = assumed if rates.peak is None or rates.sustained is None else assumed * rates.sustained / rates.peak
    parallel, memory = _spread(recipe, parts, 0 if teacher is None else _parameters(recipe, *teacher), limit)
    work = _over(tokens, work_flops_per_token(recipe, parts, teacher))
    per_token = model_flops_per_token(recipe, architecture, plan, relaxation, parts.encoder)
    devices = recipe.hardware.count
    return Estimate(
        name=recipe.name,
        source_from=None if recipe.model.source is None else yet_to_come(recipe.model.source),
        layout=cost.layout,
        recursions=plan.recursions,
        unique_layers=cost.unique_layers,
        unrolled_layers=cost.unrolled_layers,
        router=None if plan.routing is None else plan.routing.kind,
        exits=tuple(index + 1 for index in plan.exits),
        non_embedding_parameters=cost.non_embedding_parameters,
        embedding_parameters=cost.embedding_parameters,
        relaxation_parameters=cost.relaxation_parameters,
        exit_parameters=sizes["exits"],
        encoder_parameters=sizes["encoder"],
        total_parameters=sum(sizes.values()),
        trainable_parameters=trainable,
        forward_flops_per_token=forward,
        flops_per_token_6n=per_token,
        steps=steps,
        warmup_steps=None if steps is None else LearningRate.of(recipe.schedule, steps).warmup,
        rows_per_step=rows,
        tokens_per_step=rows * row_length(recipe),
        rows=None if steps is None else steps * rows,
        tokens=tokens,
        micro_batches=rows // devices // micro_batch_size(rows, devices, recipe.batch.micro),
        forward_flops=_over(tokens, forward),
        training_flops=_over(tokens, 3 * forward),
        model_flops=_over(tokens, per_token),
        work_flops=work,
        gpu=accelerator_name(recipe.hardware, device_name),
        devices=devices,
        parallel=parallel,
        memory=memory,
        device_memory=limit,
        fits=None if limit is None else memory.total <= PLANNED * limit,
        peak_tflops=rates.peak,
        sustained_tflops=rates.sustained,
        mfu=mfu,
        mfu_sustained=None if rates.sustained is None else assumed,
        seconds=None if rates.peak is None or work is None else work / (devices * rates.peak * 1e12 * mfu),
    )


def _over(tokens: int | None, each: int) -> float | None:
    return None if tokens is None else float(each * tokens)


def flops_per_token_6n(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> int:
    """6 x the parameters that a token meets: linears at every use, what steps add to them, and the head once."""
    return 6 * (_layer_weights(architecture, plan, relaxation) + architecture.vocab * architecture.hidden)


def model_flops_per_token(
    recipe: Recipe,
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    encoder: Mapping[str, Any] | None = None,
) -> int:
    """`flops_per_token_6n` for each token of a row; with an encoder (its record) the mean over source and target."""
    decoder = flops_per_token_6n(architecture, plan, relaxation)
    if encoder is None:
        return decoder
    source = 6 * cross_weights(architecture, plan)
    return over_both(recipe.data, decoder - source, source + 6 * EncoderCost.of(encoder).weights)


def work_flops_per_token(
    recipe: Recipe, parts: StudentSpec, teacher: tuple[Architecture, DepthPlan | None, Relaxation | None] | None
) -> int:
    """FLOPs of all products for one token: 2 a weight forward, 2 for the gradient of its input, 2 for its own.

    Frozen weights need no gradient of their own, and layers below nothing that learns none of their inputs either.
    """
    architecture, plan = parts.architecture, parts.plan
    if plan.routing is not None and not plan.routing.method.picks_tokens:
        plan = plan.with_routing(None)  # its training computes every recursion for every token, and discards
    layers = _layer_weights(architecture, plan, parts.relaxation)
    head = architecture.vocab * architecture.hidden
    exits = len(plan.exits) * (head + _exit_weights(parts))
    match recipe.train:
        case "all":
            work = 6 * (layers + head + exits)
        case "relaxation":
            added = layers - _layer_weights(architecture, plan, None)
            work = 4 * (layers + head + exits) + 2 * added
        case "exits" | "exit_heads":
            work = 2 * (layers + head) + len(plan.exits) * _exit_work(parts)
    if recipe.recompute not in ("none", "inner") and not recipe.exits_only:
        work += 2 * layers
    if parts.encoder is not None:
        learns = recipe.train == "all"
        source = (6 if learns else 2) * cross_weights(architecture, plan)
        again = 2 if learns and recipe.recompute == "layer" else 0
        encoder = ((6 if learns else 2) + again) * EncoderCost.of(parts.encoder).weights
        work = over_both(recipe.data, work - source, source + encoder)
    if teacher is not None:
        record = _teacher_encoder(recipe) if teacher[0].cross else None
        its_plan = teacher[1] or DepthPlan.vanilla(teacher[0].layers)
        work += model_flops_per_token(recipe, teacher[0], its_plan, teacher[2], record) // 3
    return work


def _teacher_encoder(recipe: Recipe) -> dict[str, Any] | None:
    from fathomlm.checkpoints.resolve import encoder_of

    assert recipe.loss.distill is not None
    return encoder_of(recipe.loss.distill.source)


def _exit_work(parts: StudentSpec) -> int:
    """FLOPs of one exit over a frozen model. A delta on the head makes the gradient of all rows that the exit learns over,
    an adapter or a layer only that of what the head reads, and a classifier none."""
    times = 6 if parts.exits.head_rank else 4 if parts.exits.adapter_rank or parts.exits.layer else 2
    head = parts.at_exits.vocab * parts.architecture.hidden
    return times * head + 6 * _exit_weights(parts)


def _exit_weights(parts: StudentSpec) -> int:
    """Weights of the linears that one exit adds."""
    return sum(math.prod(shape) for shape in parts.exits.shapes(parts.at_exits) if len(shape) == 2)


def _layer_weights(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> int:
    """Weights of all linears over the unrolled depth, by the part of the tokens that a router lets through."""
    part = running_parts(plan)
    plain = sum(linear.inputs * linear.outputs for linear in architecture.linears())
    added = 0
    if relaxation is not None:
        added = sum(relaxation.method.linear_weights(relaxation, linear) for linear in architecture.linears())
    skipped = sum(linear.inputs * linear.outputs for linear in architecture.linears() if linear.name in ("k", "v"))
    total = Fraction(0)
    for step in plan:
        relaxed = relaxation is not None and relaxation.sits_on(plan, step)
        own = plain + (added if relaxed else 0) - (skipped if plan.reads_kv(step) else 0)
        total += own * (part[step.recursion] if step.part == "core" else 1)
    return round(total)


def _spread(recipe: Recipe, parts: StudentSpec, teacher: int, limit: int | None) -> tuple[str, TrainingMemory]:
    """How the model lies on the devices, by the rule that a run follows, and what that takes of each."""
    from fathomlm.train.distributed import COMFORT

    if recipe.hardware.count == 1:
        return "none", count_memory(recipe, parts, teacher, "none")
    copies = count_memory(recipe, parts, teacher, "ddp")
    state = copies.weights + copies.optimizer + copies.gradients
    if recipe.parallel == "ddp" or (recipe.parallel == "auto" and (limit is None or state < COMFORT * limit)):
        return "ddp", copies
    return "fsdp", count_memory(recipe, parts, teacher, "fsdp")


def _parameters(recipe: Recipe, architecture: Architecture, plan: DepthPlan | None, relaxation: Relaxation | None) -> int:
    cost = count(architecture, plan or DepthPlan.vanilla(architecture.layers), relaxation=relaxation)
    encoder = _teacher_encoder(recipe) if architecture.cross else None
    beside = 0
    if encoder is not None:
        from fathomlm.model.encoder import encoder_parameters

        beside = encoder_parameters(encoder)
    return cost.non_embedding_parameters + cost.embedding_parameters + beside
