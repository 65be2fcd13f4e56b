"""What a routed pass decided, for losses, metrics and pictures; what a user may ask of it; and how well routers do
(thesis 4, appendix "Router Performance Evaluation Metrics"):

    sampling accuracy   expert: how often the causal rule agrees with the top-k selection
    dead-token ratio    expert: the part of a row's places that the last recursion never takes, in any row
    load, MaxVio        the part of the tokens whose depth is i; how far the fullest depth lies above an even share
    entropy             token: of the router's mean scores over the depths
    mean depth          recursions a token ran

All are sums until they are read, so that batches and ranks add up.

Shapes: B rows, T tokens, N tokens that were asked, R recursions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathomlm.depth import DepthPlan, Routing
from fathomlm.depth.routing import MOST_BIAS
from fathomlm.errors import OptionError


@dataclass(frozen=True, slots=True)
class DepthControl:
    """Depth at inference (thesis 4.6.3, test-time scaling)."""

    max_depth: int | None = None
    """At most this many recursions."""
    bias: float = 0.0
    """Added to what the routers say before they decide: above 0 sends tokens deeper, below 0 lets them leave earlier."""

    start_scale: float = 0.0
    """Models with an injection: how wide the noise is that their first loop begins from, 1 as in training; 0 is none."""
    seed: int = 0
    """Of that noise."""
    kv_loops: int | None = None
    """Looped models, in `generate` and `Session`: of how many loops keys and values are kept (`cache.DenseCache`)."""
    depths_BT: Tensor | None = None
    """Depths that are given instead of decided, 1 to the model's recursions, for measurements; without a cache."""

    def check(self, recursions: int) -> None:
        if self.max_depth is not None and not (isinstance(self.max_depth, int) and 1 <= self.max_depth <= recursions):
            raise OptionError(f"max depth must be from 1 to the model's {recursions} recursions, got {self.max_depth}")
        if not abs(self.bias) <= MOST_BIAS:
            raise OptionError(f"the depth bias must be a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, got {self.bias}")
        if not 0 <= self.start_scale < float("inf"):
            raise OptionError(f"the start scale must be a number >= 0, got {self.start_scale}")

    def kept_loops(self, plan: DepthPlan) -> int | None:
        """`kv_loops`, checked."""
        if self.kv_loops is None:
            return None
        if not plan.loops or plan.plain or plan.routing is not None or plan.kv != "cache":
            raise OptionError("kv loops require a looped model without a router or shared keys and values")
        if not (isinstance(self.kv_loops, int) and 1 <= self.kv_loops <= plan.recursions):
            raise OptionError(f"kv loops must be from 1 to the model's {plan.recursions} recursions, got {self.kv_loops}")
        return self.kv_loops

    def recursions(self, recursions: int) -> int:
        return recursions if self.max_depth is None else min(self.max_depth, recursions)


@dataclass(frozen=True, slots=True)
class TopKOptions:
    """How many tokens the top k of training are, beyond what a plan's capacities say."""

    openness: float = 0.0
    """What is left of the capacity's warm-up, 1 to 0. It sets the shapes, so each value is compiled anew."""
    exact: Tensor | None = None
    """The same to the step, at most `openness`: a float64 scalar on the device. Tokens between the two are surplus."""
    per_document: bool = False
    """Whether the documents packed into a row have a capacity each, or compete for the row's."""


@dataclass(slots=True)
class Decision:
    """expert: one recursion's selection among the tokens it was asked about."""

    logits_BN: Tensor
    judge_BN: Tensor
    """What decides at inference: the same logits, or the auxiliary router's."""
    chosen_BN: Tensor
    slots_BN: Tensor
    """The tokens' places in their rows."""
    candidates_BN: Tensor
    """False at padding, and at tokens that had stopped before."""
    selective: bool
    """Whether this recursion could turn a token away (capacity below 1)."""


@dataclass(slots=True)
class RoutingTrace:
    """Filled by a routed pass."""

    decisions: list[Decision] = field(default_factory=list)
    depth_logits_BTR: Tensor | None = None
    """token: the router's logits."""
    depth_scores_BTR: Tensor | None = None
    depths_BT: Tensor | None = None
    """How many recursions each token ran; 0 at padding."""
    keep_BT: Tensor | None = None
    """False at padding; None where there is none."""


class RoutingMeter:
    """Sums over traced passes. No pass may have rows of more than `length` tokens."""

    def __init__(self, routing: Routing, length: int, device: torch.device | str = "cpu") -> None:
        self.routing = routing
        self.length = length
        R = routing.recursions
        self._sizes = {
            "agreed": R,
            "candidates": R,
            "went": R,
            "depths": R,
            "scores": R,
            "tokens": 1,
            "taken": length,
            "seen": length,
        }
        self.sums = torch.zeros(sum(self._sizes.values()), dtype=torch.float64, device=device)
        """Everything in one tensor, which ranks may add up."""

    def add(self, trace: RoutingTrace, rows_B: Tensor | None = None) -> None:
        """Take a pass in, or some rows of it."""
        parts = {name: torch.zeros(size, dtype=torch.float64, device=self.sums.device) for name, size in self._sizes.items()}
        assert trace.depths_BT is not None
        depths = trace.depths_BT
        keep = torch.ones_like(depths, dtype=torch.bool) if trace.keep_BT is None else trace.keep_BT
        if rows_B is not None:
            keep = keep & rows_B[:, None]
        for recursion in range(self.routing.recursions):
            parts["depths"][recursion] = ((depths == recursion + 1) & keep).sum()
        parts["tokens"][0] = keep.sum()
        T = depths.shape[1]
        parts["seen"][:T] += keep.sum(0)
        parts["taken"][:T] += ((depths == self.routing.recursions) & keep).sum(0)
        for recursion, decision in enumerate(trace.decisions):
            candidates = decision.candidates_BN if rows_B is None else decision.candidates_BN & rows_B[:, None]
            parts["candidates"][recursion] = candidates.sum()
            parts["went"][recursion] = (decision.chosen_BN & candidates).sum()
            parts["agreed"][recursion] = (((decision.judge_BN >= 0) == decision.chosen_BN) & candidates).sum()
        if trace.depth_scores_BTR is not None:
            parts["scores"] += (trace.depth_scores_BTR * keep[..., None]).sum((0, 1))
        self.sums += torch.cat(list(parts.values()))

    def read(self) -> dict[str, float]:
        """The metrics of all passes so far."""
        parts = {
            name: part.tolist()
            for name, part in zip(self._sizes, torch.split(self.sums.cpu(), list(self._sizes.values())), strict=True)
        }
        tokens = max(parts["tokens"][0], 1.0)
        loads = [count / tokens for count in parts["depths"]]
        found = {"mean_depth": sum((i + 1) * load for i, load in enumerate(loads))}
        found |= {f"load_{i + 1}": load for i, load in enumerate(loads)}
        return found | self.routing.method.metrics(self.routing, loads, parts)

    def running(self) -> list[float]:
        """The part of the tokens that ran each recursion: what `cost.count` takes as a measured capacity."""
        parts = dict(zip(self._sizes, torch.split(self.sums.cpu(), list(self._sizes.values())), strict=True))
        depths, tokens = parts["depths"].tolist(), max(float(parts["tokens"]), 1.0)
        return [sum(depths[recursion:]) / tokens for recursion in range(self.routing.recursions)]
