"""What a run will be, before it starts: its model, its length, its compute, its memory and its time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.sizes import amount
from fathomlm.train.distributed import COMFORT
from fathomlm.train.flops import (
    Rates,
    accelerator_name,
    forward_flops_per_token,
    memory_bytes,
    model_flops_per_token,
    work_flops_per_token,
)
from fathomlm.train.memory import PLANNED, TrainingMemory, count_memory, student_weights
from fathomlm.train.optim import check_sharded
from fathomlm.train.reading import yet_to_come
from fathomlm.train.recipe import Recipe
from fathomlm.train.schedule import LearningRate, micro_batch_size, plan_steps, row_length, rows_per_step
from fathomlm.train.student import StudentSpec, read_student, read_teacher

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
    spec, teacher = read_student(recipe, foresee=True), read_teacher(recipe, foresee=True)
    plan = spec.plan
    cost = count(spec.architecture, plan, relaxation=spec.relaxation, context=row_length(recipe))
    forward, per_token = forward_flops_per_token(recipe, spec), model_flops_per_token(recipe, spec)
    steps = None
    if recipe.budget.epochs is None or rows_in_epoch is not None:
        steps = plan_steps(recipe, forward, rows_in_epoch).steps
    rows = rows_per_step(recipe)
    tokens = None if steps is None else steps * rows * row_length(recipe)
    weights = student_weights(spec, recipe.train)
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[weight.group] += weight.size
    assert sizes["base"] + sizes["relaxation"] + sizes["router"] == cost.non_embedding_parameters, "two counts disagree"
    limit, rates = memory_bytes(recipe.hardware, device_name), Rates.of(recipe.hardware, device_name)
    mfu = assumed if rates.peak is None or rates.sustained is None else assumed * rates.sustained / rates.peak
    parallel, memory = _parallel(recipe, spec, teacher, limit)
    work = _over(tokens, work_flops_per_token(recipe, spec, teacher))
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
        trainable_parameters=sum(weight.size for weight in weights if weight.learns),
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


def _parallel(
    recipe: Recipe, spec: StudentSpec, teacher: StudentSpec | None, limit: int | None
) -> tuple[str, TrainingMemory]:
    """How the model lies on the devices, by the rule that a run follows, and what that takes of each."""
    taught = 0 if teacher is None else sum(weight.size for weight in student_weights(teacher, "all"))
    if recipe.hardware.count == 1:
        return "none", count_memory(recipe, spec, taught, "none")
    copies = count_memory(recipe, spec, taught, "ddp")
    state = copies.weights + copies.optimizer + copies.gradients
    if recipe.parallel == "ddp" or (recipe.parallel == "auto" and (limit is None or state < COMFORT * limit)):
        return "ddp", copies
    check_sharded(recipe.optimizer, "fsdp")
    return "fsdp", count_memory(recipe, spec, taught, "fsdp")


def format_estimate(found: Estimate) -> str:
    """The estimate as text for people."""
    looped = f" looped {found.recursions} times, {found.unrolled_layers} run" if found.recursions > 1 else ""
    exits = f", exits after {', '.join(map(str, found.exits))}" if found.exits else ""
    exits += f", {found.router}-choice router" if found.router else ""
    spread = {"none": "one device", "ddp": f"{found.devices} copies", "fsdp": f"shards over {found.devices}"}
    lines = [
        ("model", f"{found.layout} layers{looped}{exits}"),
        ("parameters", f"{amount(found.non_embedding_parameters)} + {amount(found.embedding_parameters)} of embeddings"),
    ]
    if found.source_from is not None:
        lines.insert(0, ("source", f"not there yet; taken as what fathomlm train {found.source_from} leaves"))
    if found.encoder_parameters:
        lines.append(("  encoder", f"{amount(found.encoder_parameters)} besides"))
    if found.relaxation_parameters:
        lines.append(("  relaxation", f"{amount(found.relaxation_parameters)} of the first"))
    if found.exit_parameters:
        lines.append(("  exits", f"{amount(found.exit_parameters)} besides"))
    lines += [
        ("  that learn", f"{amount(found.trainable_parameters)} of {amount(found.total_parameters)}"),
        *_length(found),
        (
            "  a step",
            f"{found.rows_per_step:,} rows in {found.micro_batches} micro-batch(es) on each of {found.devices} device(s)",
        ),
        *_compute(found),
        ("memory", f"{_gb(found.memory.total)} a device ({spread[found.parallel]})"),
    ]
    record = found.memory.to_dict()
    lines += [(f"  {kind}", _gb(size)) for kind, size in record.items() if size and kind != "total"]
    lines += [("fits", _fits(found)), ("time", _time(found))]
    return "\n".join(f"{label:<14}{text}" for label, text in lines)


def _length(found: Estimate) -> list[tuple[str, str]]:
    if found.steps is None:
        return [("length", f"epochs of data that are not prepared yet, in steps of {found.tokens_per_step:,} tokens")]
    whole = f"{found.steps:,} steps of {found.tokens_per_step:,} tokens = {amount(found.tokens or 0)}, {found.rows:,} rows"
    return [("length", whole), ("  warm-up", f"{found.warmup_steps:,} steps")]


def _compute(found: Estimate) -> list[tuple[str, str]]:
    if found.steps is None:
        each = f"{found.forward_flops_per_token:.3g} FLOPs per token forward as the thesis counts"
        return [("compute", f"{each}, {3 * found.forward_flops_per_token:.3g} with backward")]
    return [
        (
            "compute",
            f"{found.forward_flops:.3g} FLOPs forward as the thesis counts, {found.training_flops:.3g} with backward",
        ),
        ("", f"{found.model_flops:.3g} as 6 x parameters x tokens; {found.work_flops:.3g} with all that this run computes"),
    ]


def _fits(found: Estimate) -> str:
    if found.fits is None or found.device_memory is None:
        return "not known: name the device with hardware.gpu"
    verdict = "yes" if found.fits else "no: lower batch.micro, set recompute: layer, or parallel: fsdp on several devices"
    return f"{verdict} ({_gb(PLANNED * found.device_memory)} of {_gb(found.device_memory)} are planned for)"


def _time(found: Estimate) -> str:
    if found.steps is None:
        return "not known, as the length"
    if found.seconds is None:
        return "not known: name the device with hardware.gpu, or give hardware.peak_tflops"
    hours = found.seconds / 3600
    length = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    device = f"{found.devices} x {found.gpu}" if found.gpu else f"{found.devices} device(s)"
    assumed = f"{found.mfu:.0%} of {found.peak_tflops:g} TFLOP/s each"
    if found.sustained_tflops is not None:
        assumed += f" ({found.mfu_sustained:.0%} of the {found.sustained_tflops:g} that large products sustain)"
    return f"{length} on {device}, assuming {assumed}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
