"""What every kind of router answers: its options, its weights, how many tokens it lets through, what teaches it.

A kind is one object without state. `Routing` holds the settings that a model was given and hands them to the methods
below; the counters, the converter, the trainer and the engine ask nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from fathomlm.options import option

Score = Literal["sigmoid", "tanh", "identity", "softmax"]
Network = Literal["linear", "mlp", "wide"]
Sampling = Literal["aux_loss", "aux_router"]
Balancing = Literal["loss", "loss_free"]
Update = Literal["add", "interpolate"]
Weighting = Literal["every", "last"]
WIDE = 4
"""How much wider than the model the hidden layer of a wide router is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """What a kind reads of a `Routing`: what `RouterOptions` ask for, with nothing left out."""

    kind: str
    score: Score
    network: Network = option("linear")
    alpha: float = option(gt=0)
    capacity: tuple[float, ...]
    sampling: Sampling = option("aux_loss")
    balancing: Balancing = option("loss")
    weighting: Weighting = option("every")
    update: Update = option("add")
    random: bool = option(False)

    @property
    def recursions(self) -> int:
        return len(self.capacity)


class RouterKind:
    """The base of all kinds; each is an `ExpertChoice` or a `TokenChoice`, or derives from one of the two."""

    module: str
    """The torch half: a subclass of `Routers`, imported when a model is built."""
    scores: tuple[str, ...]
    """What may be made of a router's output; the first is the default."""
    options: tuple[str, ...] = ()
    """The fields of `Routing` that other kinds do not have."""
    picks_tokens: bool
    """Whether each recursion picks its tokens, as many as its capacity. If not, each token is given its depth once, in
    front of the first recursion; how many run each one then depends on the data, also in training."""

    serves = True
    """Whether the engine can run it, by the rules of the kind that it derives from."""

    def default_alpha(self, score: str) -> float:
        return 1.0

    def parts(self, routing: RoutingSettings) -> tuple[Fraction, ...]:
        """The part of the tokens that runs each recursion."""
        raise NotImplementedError

    def takes_all_first(self, routing: RoutingSettings) -> bool:
        """Whether the first recursion runs every token."""
        return True

    def shapes(self, routing: RoutingSettings, hidden: int) -> list[tuple[int, ...]]:
        """The weights of all routers of a model."""
        raise NotImplementedError

    def loss_weight(self, routing: RoutingSettings) -> float:
        """Of its auxiliary loss in training, unless a recipe says."""
        raise NotImplementedError

    def z_weight(self, routing: RoutingSettings) -> float:
        return 0.0

    def conversion(self, options: dict[str, Any]) -> dict[str, Any]:
        """The fields of a router that is added to weights which were trained without one."""
        return options

    def metrics(
        self, routing: RoutingSettings, loads: Sequence[float], sums: Mapping[str, Sequence[float]]
    ) -> dict[str, float]:
        """What `RoutingMeter` reports beside depths: `loads` are the parts of the tokens by depth, `sums` its counts."""
        return {}


def network_shapes(network: str, hidden: int, outputs: int) -> list[tuple[int, ...]]:
    """One router: a linear map, or two."""
    inner = inner_width(network, hidden)
    return [(outputs, hidden)] if inner is None else [(inner, hidden), (outputs, inner)]


def inner_width(network: str, hidden: int) -> int | None:
    return {"linear": None, "mlp": hidden, "wide": WIDE * hidden}[network]


def falling_parts(recursions: int) -> tuple[Fraction, ...]:
    """(R - i) / R: all depths equally used."""
    return tuple(Fraction(recursions - i, recursions) for i in range(recursions))
