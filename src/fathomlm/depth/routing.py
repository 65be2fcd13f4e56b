"""Routing: how tokens of a looped model are given their depth (thesis 4.3.2), as plain numbers and names.

    expert   each recursion picks tokens: a router scores those that the recursion before kept, the best k go on.
             Training takes the top k; inference takes all whose score passes a threshold, which needs no future token.
    token    each token picks its depth once, before the first recursion.

Defaults are the thesis' final choices (its tables on router design): expert-choice with an auxiliary loss, sigmoid, one
linear router a recursion, alpha 0.1 (1 without a function); token-choice with a balancing loss, softmax, linear.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fathomlm.depth.bounds import BOUNDS, check_flag, check_number, check_record
from fathomlm.errors import OptionError, choices, is_number
from fathomlm.jsonfile import shown

RouterKind = Literal["expert", "token"]
Score = Literal["sigmoid", "tanh", "identity", "softmax"]
Network = Literal["linear", "mlp", "wide"]
Sampling = Literal["aux_loss", "aux_router"]
Balancing = Literal["loss", "loss_free"]
Update = Literal["add", "interpolate"]
Weighting = Literal["every", "last"]
ROUTERS: tuple[str, ...] = get_args(RouterKind)
SCORES: dict[str, tuple[str, ...]] = {"expert": ("sigmoid", "tanh", "identity"), "token": ("softmax", "sigmoid")}
NETWORKS: tuple[str, ...] = get_args(Network)
WIDE = 4
"""How much wider than the model the hidden layer of a wide router is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What decides how deep each token goes. Make one with `build_routing`, which fills in the defaults of its kind."""

    kind: RouterKind
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

    def __post_init__(self) -> None:
        for what, value, known in (
            ("router", self.kind, ROUTERS),
            ("score", self.score, SCORES.get(str(self.kind), ())),
            ("router network", self.network, NETWORKS),
            ("sampling", self.sampling, get_args(Sampling)),
            ("balancing", self.balancing, get_args(Balancing)),
            ("weighting", self.weighting, get_args(Weighting)),
            ("update", self.update, get_args(Update)),
        ):
            if value not in known:
                raise OptionError(choices(what, str(value), known))
        check_number("alpha", self.alpha, above=0.0)
        check_flag("random", self.random)
        before = 1.0
        for part in self.capacity:
            if not 0 < part <= before:
                shown = ", ".join(f"{c:g}" for c in self.capacity)
                raise OptionError(f"capacities must fall from at most 1 and stay above 0, got {shown}")
            before = part

    @property
    def recursions(self) -> int:
        return len(self.capacity)

    def kept(self, recursion: int, tokens: int, openness: float = 0.0) -> int:
        """expert: how many of a row's tokens a recursion keeps in training. `openness` (1 to 0) is how much of the warm-up
        from capacity 1 is left."""
        return max(1, min(tokens, int(self.part(recursion, openness) * tokens + 1e-9)))

    def part(self, recursion: int, openness: Any) -> Any:
        """expert: the part of the tokens that a recursion keeps in training. `openness` is a number, or a tensor of one."""
        part = self.capacity[recursion]
        return part + openness * (1 - part)

    def shapes(self, hidden: int) -> list[tuple[int, ...]]:
        """The weights of all routers."""
        outputs = 1 if self.kind == "expert" else self.recursions
        inner = {"linear": None, "mlp": hidden, "wide": WIDE * hidden}[self.network]
        one: list[tuple[int, ...]] = [(outputs, hidden)] if inner is None else [(inner, hidden), (outputs, inner)]
        if self.kind == "token":
            return one + ([(self.recursions,)] if self.balancing == "loss_free" else [])
        return one * self.recursions * (2 if self.sampling == "aux_router" else 1)

    def parameters(self, hidden: int) -> int:
        """How many that is."""
        return sum(math.prod(shape) for shape in self.shapes(hidden))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"capacity": list(self.capacity)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Routing:
        fields = dataclasses.fields(cls)
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        check_record("routing", record, [field.name for field in fields], required)
        parts = record["capacity"]
        if not isinstance(parts, list) or not all(is_number(part) for part in parts) or len(parts) > BOUNDS["recursions"][1]:
            raise OptionError(f"capacity must be a list with a number for each recursion, got {shown(parts)}")
        return cls(**(record | {"capacity": tuple(float(part) for part in parts)}))


def build_routing(
    kind: str,
    recursions: int,
    *,
    score: str | None = None,
    network: str | None = None,
    alpha: float | None = None,
    capacity: list[float] | tuple[float, ...] | None = None,
    sampling: str | None = None,
    balancing: str | None = None,
    weighting: str | None = None,
    update: str | None = None,
    random: bool = False,
) -> Routing:
    """A routing with what is not given set to the thesis' choice for its kind."""
    if kind not in ROUTERS:
        raise OptionError(choices("router", kind, ROUTERS))
    if recursions < 2:
        raise OptionError(f"a router needs at least 2 recursions to choose between, got {recursions}")
    if capacity is not None and len(capacity) != recursions:
        raise OptionError(f"there are {recursions} recursions but {len(capacity)} capacities")
    only = {"expert": ("capacity", "sampling", "update"), "token": ("balancing", "weighting")}
    given = {"capacity": capacity, "sampling": sampling, "update": update, "balancing": balancing, "weighting": weighting}
    for other, names in only.items():
        for name in names if other != kind else ():
            if given[name] is not None:
                raise OptionError(f"{name} goes with {other}-choice routing, not with {kind}-choice")
    falling = tuple((recursions - i) / recursions for i in range(recursions))
    return Routing(
        kind=kind,  # type: ignore[arg-type]
        score=score or ("sigmoid" if kind == "expert" else "softmax"),  # type: ignore[arg-type]
        network=network or "linear",  # type: ignore[arg-type]
        alpha=alpha if alpha is not None else (0.1 if kind == "expert" and score != "identity" else 1.0),
        capacity=falling if capacity is None else tuple(float(part) for part in capacity),
        sampling=sampling or "aux_loss",  # type: ignore[arg-type]
        balancing=balancing or "loss",  # type: ignore[arg-type]
        weighting=weighting or "every",  # type: ignore[arg-type]
        update=update or "add",  # type: ignore[arg-type]
        random=random,
    )
