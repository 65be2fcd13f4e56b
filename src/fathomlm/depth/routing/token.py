"""Token-choice: each token picks its depth once, before the first recursion (thesis 4.3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from fathomlm.depth.routing.kind import RouterKind, RoutingSettings, falling_parts, network_shapes


class TokenChoice(RouterKind):
    module = "fathomlm.model.route.token:TokenRouters"
    scores = ("softmax", "sigmoid")
    options = ("balancing", "weighting")
    picks_tokens = False

    def parts(self, routing: RoutingSettings) -> tuple[Fraction, ...]:
        """As if its depths were equally used, which is what expert-choice's capacities are made to match."""
        return falling_parts(routing.recursions)

    def shapes(self, routing: RoutingSettings, hidden: int) -> list[tuple[int, ...]]:
        bias = [(routing.recursions,)] if routing.balancing == "loss_free" else []
        return network_shapes(routing.network, hidden, routing.recursions) + bias

    def loss_weight(self, routing: RoutingSettings) -> float:
        return 0.1 if routing.balancing == "loss" else 0.0

    def z_weight(self, routing: RoutingSettings) -> float:
        return 0.001

    def metrics(
        self, routing: RoutingSettings, loads: Sequence[float], sums: Mapping[str, Sequence[float]]
    ) -> dict[str, float]:
        tokens = max(sums["tokens"][0], 1.0)
        shares = [score / tokens for score in sums["scores"]]
        whole = sum(shares) or 1.0
        entropy = -sum(s / whole * math.log(s / whole) for s in shares if s > 0)
        return {"max_violation": max(loads) * routing.recursions - 1, "entropy": entropy}
