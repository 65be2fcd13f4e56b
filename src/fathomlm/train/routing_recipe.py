"""The part of a recipe that is about routers: which one, and what teaches it (thesis 4.3.2, 4.3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fathomlm.depth import Routing, build_routing
from fathomlm.depth.routing import Network, Sampling, Score, Update, Weighting


@dataclass(frozen=True, kw_only=True)
class RouterRecipe:
    """The router; what is left out is the thesis' choice for its kind."""

    kind: str = "expert"
    """Recursions pick tokens (expert), or tokens their depth (token)."""
    score: Score | None = None
    """expert: sigmoid, tanh, identity (sigmoid); token: softmax, sigmoid (softmax)."""
    network: Network | None = None
    """linear, mlp, or wide: an mlp four times as wide as the model (linear)."""
    alpha: float | None = None
    """Multiplies the score to give the weight of a recursion's output (expert 0.1, or 1 with identity; token 1)."""
    capacity: list[float] | None = None
    """expert: the part of the tokens that each recursion keeps ((N - i)/N)."""
    sampling: Sampling | None = None
    """expert: what decides at inference: aux_loss teaches the router itself, aux_router a second one (aux_loss)."""
    balancing: Literal["loss", "loss_free"] | None = None
    """token: a loss, or a bias that is moved (loss)."""
    weighting: Weighting | None = None
    """token: every recursion's output is weighted, or the last one's only (every)."""
    update: Update | None = None
    """expert: add, x + g f(x), or interpolate, x + g (f(x) - x) (add)."""
    random: bool = False
    """The control: depth is drawn, by token and position; expert keeps the same parts on average, token uses all depths
    alike."""

    def build(self, recursions: int) -> Routing:
        return build_routing(
            self.kind,
            recursions,
            score=self.score,
            network=self.network,
            alpha=self.alpha,
            capacity=self.capacity,
            sampling=self.sampling,
            balancing=self.balancing,
            weighting=self.weighting,
            update=self.update,
            random=self.random,
        )


@dataclass(frozen=True, kw_only=True)
class RoutingLossRecipe:
    """What teaches a router beside the next token."""

    coefficient: float | None = None
    """Of the auxiliary or balancing loss (0.001 for aux_loss, 1 for aux_router, 0.1 for balancing)."""
    z: float | None = None
    """Of the z-loss, which keeps logits small (expert 0, token 0.001)."""
    bias_rate: float = 0.001
    """token, loss_free: how far the bias moves in a step."""
    capacity_warmup: int = 0
    """expert: optimizer steps over which capacities fall from 1 to their value."""
    capacity_warmup_shape: Literal["stairs", "smooth"] = "stairs"
    """stairs: capacities fall in eight equal stairs. smooth: they fall with every step, in the shapes of the stairs, so that
    a step costs what it does on its stair."""
    capacity_per_document: bool = False
    """expert: each packed document keeps its own part of its tokens; otherwise (the default, as in the thesis) all tokens of
    a row compete. Requires data.document_mask."""
    aux_lr: float = 1.0
    """aux_router: its learning rate, as a part of the model's."""

    def weight(self, routing: Routing) -> float:
        return routing.method.loss_weight(routing) if self.coefficient is None else self.coefficient

    def z_weight(self, routing: Routing) -> float:
        return routing.method.z_weight(routing) if self.z is None else self.z


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
