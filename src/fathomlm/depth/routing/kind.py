"""What every kind of router answers: its options, its weights, how many tokens it lets through, what teaches it.

A kind is one object without state. `Routing` holds the settings that a model was given and hands them to the methods
below; the counters, the converter, the trainer and the engine ask nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

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
    """What a kind reads of a `Routing`."""

    kind: str
    score: Score
    """What is made of a router's output; identity is the thesis' row without a function."""
    network: Network = "linear"
    alpha: float
    """Multiplies the score to give the weight of a recursion's output."""
    capacity: tuple[float, ...]
    """expert: the part of all tokens that each recursion keeps in training."""
    sampling: Sampling = "aux_loss"
    """expert: what decides at inference: the router itself, taught by an auxiliary loss, or a second one beside it."""
    balancing: Balancing = "loss"
    """token: what keeps the depths in use: a loss, or a bias that is moved and takes part in the selection only."""
    weighting: Weighting = "every"
    """token: whether every recursion's output is weighted (the thesis' text) or the last one's only (its code)."""
    update: Update = "add"
    """expert: x + g f(x), as in the thesis, or x + g (f(x) - x), which at g = 1 is the plain recursive model."""
    random: bool = False
    """The control: depth is drawn, from the token and its position, and not decided. Scores still weigh what recursions
    add, so that only the choice differs."""

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
