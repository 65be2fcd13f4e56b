"""What teaches routers (thesis 4, appendix "Design Choices for Routing Strategy").

Each is a mean over a row's tokens, times the tokens of that row that have a target, summed over rows: divided by the
targets of a whole step it is a mean again, so that micro-batches and ranks do not change it.

Shapes: B rows, T tokens, N tokens that were asked, R recursions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.depth import Routing
from fathomlm.model.route import RoutingTrace, routers_of
from fathomlm.train.recipe import RoutingLossRecipe


def routing_names(routing: Routing) -> tuple[str, ...]:
    """What the parts of `routing_parts` are called."""
    loss, z, *figures = routers_of(routing).loss_names(routing)
    return (loss, z, "mean_depth", *figures)


def routing_parts(trace: RoutingTrace, routing: Routing, counted_B: Tensor) -> dict[str, Tensor]:
    """The losses (`router`, `router_z`), unweighted, and figures to watch."""
    assert trace.depths_BT is not None
    keep = torch.ones_like(trace.depths_BT, dtype=torch.bool) if trace.keep_BT is None else trace.keep_BT
    tokens = keep.sum(1).clamp_min(1)
    depth = (counted_B * (trace.depths_BT * keep).sum(1) / tokens).sum()
    return {"mean_depth": depth} | routers_of(routing).losses(trace, routing, keep, counted_B)


STAIRS = 8
"""Steps in which a capacity falls: each is a new shape, and so a new compilation."""


def smooth_openness(recipe: RoutingLossRecipe, step: int) -> float:
    """`openness` that falls with every step, and never lies above it."""
    return 0.0 if step >= recipe.capacity_warmup else 1.0 - step / recipe.capacity_warmup


def openness(recipe: RoutingLossRecipe, step: int) -> float:
    """What is left of the capacity's warm-up before optimizer step `step`, from 1 to 0."""
    if step >= recipe.capacity_warmup:
        return 0.0
    return 1.0 - (step * STAIRS // recipe.capacity_warmup) / STAIRS
