"""FLOPs of a training run for each token of a row. What a plan's steps cost is counted in `depth/cost.py`, once.

They are stated in two ways. "As the thesis counts" is the forward pass without embedding and head (appendix "FLOPs
approximated calculation of Transformers"). "6 x parameters x tokens", with looped layers counted per use and the head once,
is what the field states utilisation (MFU) against, and so do we.

Of pairs a row is source_length + target_length tokens: the encoder runs for the first, the decoder for the second, and what
both do is spread over all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count, encoder_flops, linear_weights
from fathomlm.train.losses.exits import early_outputs
from fathomlm.train.recipe import DataRecipe, Recipe
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
    import torch

    from fathomlm.model.encoder import build_encoder

    with torch.device("meta"):
        linears = [module for module in build_encoder(record).modules() if isinstance(module, torch.nn.Linear)]
    return sum(linear.weight.numel() for linear in linears)


def _over_row(data: DataRecipe, target: int, source: int) -> int:
    """The mean over a row's tokens of something that each target token and each source token has."""
    S, T = data.source_length, data.target_length
    return round((target * T + source * S) / (S + T))
