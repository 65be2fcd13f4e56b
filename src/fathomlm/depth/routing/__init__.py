"""Routing: how tokens of a looped model are given their depth (thesis 4.3.2), as plain numbers and names. One kind of router
a file, all of them in `ROUTERS`.

Defaults are the thesis' final choices (its tables on router design): expert-choice with an auxiliary loss, sigmoid, one
linear router a recursion, alpha 0.1 (1 without a function); token-choice with a balancing loss, softmax, linear.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args

from fathomlm.depth.bounds import BOUNDS, check_flag, check_number, check_record
from fathomlm.depth.routing.expert import ExpertChoice
from fathomlm.depth.routing.kind import (
    Balancing,
    Network,
    RouterKind,
    RoutingSettings,
    Sampling,
    Score,
    Update,
    Weighting,
)
from fathomlm.depth.routing.token import TokenChoice
from fathomlm.errors import OptionError, choices, is_number
from fathomlm.jsonfile import shown

NETWORKS: tuple[str, ...] = get_args(Network)
ROUTERS: dict[str, RouterKind] = {"expert": ExpertChoice(), "token": TokenChoice()}
"""Every kind of router by its name in options, recipes and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(RoutingSettings):
    """What decides how deep each token goes. Make one with `build_routing`, which fills in the defaults of its kind."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ROUTERS:
            raise OptionError(choices("router", str(self.kind), ROUTERS))
        for what, value, known in (
            ("score", self.score, self.method.scores),
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
    def method(self) -> RouterKind:
        """What its kind answers; see `RouterKind`."""
        return ROUTERS[self.kind]

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
        return self.method.shapes(self, hidden)

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
        raise OptionError(f"a router requires recursions >= 2, got {recursions}")
    if capacity is not None and len(capacity) != recursions:
        raise OptionError(f"capacity must have one entry per recursion: got {len(capacity)} for {recursions} recursions")
    method = ROUTERS[kind]
    given = {"capacity": capacity, "sampling": sampling, "update": update, "balancing": balancing, "weighting": weighting}
    for name in (name for name, value in given.items() if value is not None and name not in method.options):
        raise OptionError(f"{name} cannot be combined with {kind}-choice routing")
    chosen = score or method.scores[0]
    falling = tuple((recursions - i) / recursions for i in range(recursions))
    return Routing(
        kind=kind,
        score=chosen,  # type: ignore[arg-type]
        network=network or "linear",  # type: ignore[arg-type]
        alpha=method.default_alpha(chosen) if alpha is None else alpha,
        capacity=falling if capacity is None else tuple(float(part) for part in capacity),
        sampling=sampling or "aux_loss",  # type: ignore[arg-type]
        balancing=balancing or "loss",  # type: ignore[arg-type]
        weighting=weighting or "every",  # type: ignore[arg-type]
        update=update or "add",  # type: ignore[arg-type]
        random=random,
    )


__all__ = [
    "NETWORKS",
    "ROUTERS",
    "Balancing",
    "Network",
    "RouterKind",
    "Routing",
    "Sampling",
    "Score",
    "Update",
    "Weighting",
    "build_routing",
]
