"""FLOPs of a training run for each token of a row, and of the devices that compute them. What a plan's steps cost is counted
in `depth/cost.py`, once.

They are stated in two ways. "As the thesis counts" is the forward pass without embedding and head (appendix "FLOPs
approximated calculation of Transformers"). "6 x parameters x tokens", with looped layers counted per use and the head once,
is what the field states utilisation (MFU) against, and so do we.

Of pairs a row is source_length + target_length tokens: the encoder runs for the first, the decoder for the second, and what
both do is spread over all.

Peaks of devices are data-sheet figures for dense bfloat16 products. No product reaches them: where the rate that a chip
sustains on large products is known, utilisation is stated against that too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count, encoder_flops, linear_weights
from fathomlm.errors import OptionError, choices
from fathomlm.model.encoder import build_encoder
from fathomlm.train.losses.exits import early_outputs
from fathomlm.train.recipe import DataRecipe, HardwareRecipe, Recipe
from fathomlm.train.schedule import row_length
from fathomlm.train.student import StudentSpec


def forward_flops_per_token(recipe: Recipe, spec: StudentSpec) -> int:
    """As the thesis counts."""
    shapes: Any = {"architecture": spec.architecture, "plan": spec.plan, "relaxation": spec.relaxation}
    if spec.encoder is None:
        return count(**shapes, context=row_length(recipe)).forward_flops_per_token
    S, T = recipe.data.source_length, recipe.data.target_length
    decoder = count(**shapes, context=T, source=S).forward_flops_per_token
    return _over_row(recipe.data, decoder, encoder_flops(spec.encoder, encoder_weights(spec.encoder), S))


def flops_per_token_6n(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> int:
    """6 x the parameters that a token meets: linears at every use, what steps add to them, and the head once."""
    return 6 * (sum(linear_weights(architecture, plan, relaxation)) + architecture.head.weights)


def model_flops_per_token(recipe: Recipe, spec: StudentSpec) -> int:
    """`flops_per_token_6n`; with an encoder the mean over source and target."""
    decoder = flops_per_token_6n(spec.architecture, spec.plan, spec.relaxation)
    if spec.encoder is None:
        return decoder
    source = 6 * linear_weights(spec.architecture, spec.plan, spec.relaxation)[1]
    return _over_row(recipe.data, decoder - source, source + 6 * encoder_weights(spec.encoder))


def work_flops_per_token(recipe: Recipe, spec: StudentSpec, teacher: StudentSpec | None) -> int:
    """FLOPs of all products: 2 a weight forward, 2 for the gradient of its input, 2 for its own.

    Frozen weights need no gradient of their own, and layers below nothing that learns none of their inputs either.
    """
    architecture, plan = spec.architecture, spec.plan
    if plan.routing is not None and not plan.routing.method.picks_tokens:
        plan = spec.unrouted_plan  # its training computes every recursion for every token, and discards
    layers = sum(linear_weights(architecture, plan, spec.relaxation))
    headless = recipe.loss.heal is not None and recipe.loss.heal.alone
    head = 0 if headless else architecture.head.weights
    early = early_outputs(recipe.loss.exits, plan)
    exits = early * (head + _exit_weights(spec))
    match recipe.train:
        case "all":
            work = 6 * (layers + head + exits)
        case "relaxation":
            added = layers - sum(linear_weights(architecture, plan, None))
            work = 4 * (layers + head + exits) + 2 * added
        case "exits" | "exit_heads":
            work = 2 * (layers + head) + early * _exit_work(spec)
    if recipe.recompute not in ("none", "inner") and not recipe.exits_only:
        work += 2 * layers
    if spec.encoder is not None:
        learns = recipe.train == "all"
        source = (6 if learns else 2) * linear_weights(architecture, plan, spec.relaxation)[1]
        again = 2 if learns and recipe.recompute == "layer" else 0
        encoder = ((6 if learns else 2) + again) * encoder_weights(spec.encoder)
        work = _over_row(recipe.data, work - source, source + encoder)
    return work if teacher is None else work + model_flops_per_token(recipe, teacher) // 3


def _exit_work(spec: StudentSpec) -> int:
    """FLOPs of one exit over a frozen model. A delta on the head makes the gradient of all rows that the exit learns over,
    an adapter or a layer only that of what the head reads, and a classifier none."""
    times = 6 if spec.exits.head_rank else 4 if spec.exits.adapter_rank or spec.exits.layer or spec.exits.draft else 2
    return times * spec.at_exits.head.weights + 6 * _exit_weights(spec)


def _exit_weights(spec: StudentSpec) -> int:
    """Weights of the linears that one exit adds."""
    return sum(math.prod(shape) for shape in spec.exits.shapes(spec.at_exits) if len(shape) == 2)


def encoder_weights(record: Mapping[str, Any]) -> int:
    """Of all linears of the encoder that a record describes."""
    with torch.device("meta"):
        linears = [module for module in build_encoder(record).modules() if isinstance(module, torch.nn.Linear)]
    return sum(linear.weight.numel() for linear in linears)


def _over_row(data: DataRecipe, target: int, source: int) -> int:
    """The mean over a row's tokens of something that each target token and each source token has."""
    S, T = data.source_length, data.target_length
    return round((target * T + source * S) / (S + T))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device."""

    peak: float
    """Dense bfloat16 TFLOP/s by its data sheet."""
    memory: float
    """GB (10^9 bytes) by its data sheet."""
    device_name: str
    """A pattern for the name that the driver gives it, in lower case."""
    sustained: float | None = None
    """Dense bfloat16 TFLOP/s that large matrix products reach, measured on an H200; an H100 has the same chip."""


ACCELERATORS: dict[str, Accelerator] = {
    "a100-40gb": Accelerator(peak=312, memory=40, device_name=r"\ba100\b.*\b40gb\b"),
    "a100-80gb": Accelerator(peak=312, memory=80, device_name=r"\ba100\b.*\b80gb\b"),
    "h100": Accelerator(peak=989, memory=80, device_name=r"\bh100\b", sustained=790),
    "h200": Accelerator(peak=989, memory=141, device_name=r"\bh200\b", sustained=790),
    "b200": Accelerator(peak=2250, memory=180, device_name=r"\bb200\b"),
    "l40s": Accelerator(peak=362, memory=48, device_name=r"\bl40s\b"),
    "rtx3090": Accelerator(peak=71, memory=24, device_name=r"\brtx 3090$"),
    "rtx4090": Accelerator(peak=165, memory=24, device_name=r"\brtx 4090$"),
}
SHORT = {"a100": "a100-80gb"}
"""Names that leave out what is usual."""


def accelerator_name(hardware: HardwareRecipe, device_name: str | None = None) -> str | None:
    """The known accelerator that a recipe names, or else the one that a driver's device name stands for."""
    if hardware.gpu is not None:
        name = SHORT.get(hardware.gpu.lower(), hardware.gpu.lower())
        if name not in ACCELERATORS:
            raise OptionError(choices("hardware.gpu", hardware.gpu, [*ACCELERATORS, *SHORT]))
        return name
    found = (device_name or "").lower()
    return next((name for name, device in ACCELERATORS.items() if re.search(device.device_name, found)), None)


@dataclass(frozen=True, slots=True)
class Rates:
    """Dense bfloat16 TFLOP/s of one device."""

    peak: float | None
    """By its data sheet or by the recipe, what MFU is a part of; None where nothing is known of the device."""
    sustained: float | None
    """On large products; None where nobody has measured it, and where the recipe gives a peak of its own."""

    @classmethod
    def of(cls, hardware: HardwareRecipe, device_name: str | None = None) -> Rates:
        name = accelerator_name(hardware, device_name)
        if hardware.peak_tflops is not None:
            return cls(hardware.peak_tflops, None)
        return cls(None, None) if name is None else cls(ACCELERATORS[name].peak, ACCELERATORS[name].sustained)

    def parts(self, flops_per_s: float) -> dict[str, float | None]:
        """What a rate of one device is of each: `mfu` of the data sheet's, `mfu_sustained` of the sustained one."""
        both = {"mfu": self.peak, "mfu_sustained": self.sustained}
        return {name: None if rate is None else round(flops_per_s / (rate * 1e12), 4) for name, rate in both.items()}


def memory_bytes(hardware: HardwareRecipe, device_name: str | None = None) -> int | None:
    """Memory of one device, or None where it is not known."""
    name = accelerator_name(hardware, device_name)
    return None if name is None else round(ACCELERATORS[name].memory * 1e9)
