"""What a routed pass decided, for losses, metrics and pictures; and what a user may ask of it.

Shapes: B rows, T tokens, N tokens that were asked, R recursions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fathomlm.errors import OptionError


@dataclass(frozen=True, slots=True)
class DepthControl:
    """Depth at inference (thesis 4.6.3, test-time scaling)."""

    max_depth: int | None = None
    """At most this many recursions."""
    bias: float = 0.0
    """Added to what the routers say before they decide: above 0 sends tokens deeper, below 0 lets them leave earlier."""

    depths_BT: Tensor | None = None
    """Depths that are given instead of decided, 1 to the model's recursions, for measurements; without a cache."""

    def check(self, recursions: int) -> None:
        if self.max_depth is not None and not (isinstance(self.max_depth, int) and 1 <= self.max_depth <= recursions):
            raise OptionError(f"max depth must be from 1 to the model's {recursions} recursions, got {self.max_depth}")
        if not -float("inf") < self.bias < float("inf"):
            raise OptionError(f"the depth bias must be a number, got {self.bias}")

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
    asked_BN: Tensor
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
