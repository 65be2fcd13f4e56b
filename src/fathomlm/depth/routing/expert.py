"""Expert-choice: each recursion picks tokens (thesis 4.3.2).

A router scores those that the recursion before kept, and the best k go on. Training takes the top k; inference takes all
whose score passes a threshold, which needs no future token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from fathomlm.depth.routing.kind import RouterKind, RoutingSettings, falling_parts, network_shapes


class ExpertChoice(RouterKind):
    module = "fathomlm.model.route.expert:ExpertRouters"
    scores = ("sigmoid", "tanh", "identity")
    options = ("capacity", "sampling", "update")
    picks_tokens = True

    def default_alpha(self, score: str) -> float:
        return 1.0 if score == "identity" else 0.1

    def parts(self, routing: RoutingSettings) -> tuple[Fraction, ...]:
        falling = falling_parts(routing.recursions)
        exact = routing.capacity == tuple(float(part) for part in falling)
        return falling if exact else tuple(Fraction(part) for part in routing.capacity)

    def takes_all_first(self, routing: RoutingSettings) -> bool:
        return routing.capacity[0] >= 1

    def shapes(self, routing: RoutingSettings, hidden: int) -> list[tuple[int, ...]]:
        one = network_shapes(routing.network, hidden, 1)
        return one * routing.recursions * (2 if routing.sampling == "aux_router" else 1)

    def loss_weight(self, routing: RoutingSettings) -> float:
        return 0.001 if routing.sampling == "aux_loss" else 1.0

    def conversion(self, options: dict[str, Any]) -> dict[str, Any]:
        """Trained weights move towards the block's output (`interpolate`): the thesis' own x + 0.1 g f(x) is for models that
        never knew another formula. With alpha 2 a sigmoid's middle is a gate of 1."""
        options = {"update": "interpolate"} | options
        if options["update"] == "interpolate" and options.get("alpha") is None:
            options["alpha"] = 2.0 if options.get("score") in (None, "sigmoid") else 1.0
        return options

    def metrics(
        self, routing: RoutingSettings, loads: Sequence[float], sums: Mapping[str, Sequence[float]]
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        selective = [i for i, part in enumerate(routing.capacity) if part < 1]
        candidates = sum(sums["candidates"][i] for i in selective)
        if candidates:
            found["sampling_accuracy"] = sum(sums["agreed"][i] for i in selective) / candidates
        places = [(taken, seen) for taken, seen in zip(sums["taken"], sums["seen"], strict=True) if seen]
        found["dead_tokens"] = sum(taken == 0 for taken, _ in places) / max(len(places), 1)
        return found
