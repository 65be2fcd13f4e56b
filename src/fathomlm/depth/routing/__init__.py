"""Routing: how tokens of a looped model are given their depth (thesis 4.3.2), as plain numbers and names. One kind of router
a file, all of them in `ROUTERS`.

Defaults are the thesis' final choices (its tables on router design): expert-choice with an auxiliary loss, sigmoid, one
linear router a recursion, alpha 0.1 (1 without a function); token-choice with a balancing loss, softmax, linear.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fathomlm.depth.bounds import read_record, to_record
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
    falling_parts,
)
from fathomlm.depth.routing.token import TokenChoice
from fathomlm.errors import OptionError, choices
from fathomlm.options import check, option

MOST_BIAS = 1e30
"""Of a depth bias: far beyond any scores, and still a number in float32 when it is multiplied by the recursions."""

ROUTERS: dict[str, RouterKind] = {"expert": ExpertChoice(), "token": TokenChoice()}
"""Every kind of router by its name in options, recipes and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What may be asked of a router; None is the thesis' choice for its kind."""

    kind: str = option(
        "expert", choices=tuple(ROUTERS), help="expert (recursions pick tokens) or token (tokens pick their depth)"
    )
    score: Score | None = option(
        None, metavar="NAME", help="expert: sigmoid (default), tanh or identity; token: softmax (default) or sigmoid"
    )
    """What is made of a router's output; identity is the thesis' row without a function."""
    network: Network | None = option(None, help="network of the router", default_text="linear")
    """wide is an mlp four times as wide as the model."""
    alpha: float | None = option(None, gt=0, metavar="A", help="weight of a recursion's output at score 1")
    """expert 0.1, or 1 with identity; token 1."""
    capacity: list[float] | None = option(None)
    """expert: the part of all tokens that each recursion keeps in training ((N - i)/N)."""
    sampling: Sampling | None = option(None)
    """expert: what decides at inference: the router itself, taught by an auxiliary loss (aux_loss, the default), or a second
    one beside it (aux_router)."""
    balancing: Balancing | None = option(None)
    """token: what keeps the depths in use: a loss (the default), or a bias that is moved and takes part in the selection
    only."""
    weighting: Weighting | None = option(None)
    """token: whether every recursion's output is weighted (the thesis' text, the default) or the last one's only (its
    code)."""
    update: Update | None = option(
        None, help="expert: interpolate, x + g (f(x) - x), or add, x + g f(x), as the thesis trains from scratch"
    )
    """add is the default; interpolate at g = 1 is the plain recursive model."""
    random: bool = option(False)
    """The control: depth is drawn, from the token and its position, and not decided. Scores still weigh what recursions
    add, so that only the choice differs. expert keeps the same parts on average, token uses all depths alike."""

    def build(self, recursions: int) -> Routing:
        """A routing with what is not given set to the thesis' choice for its kind."""
        if self.kind not in ROUTERS:
            raise OptionError(choices("router", self.kind, ROUTERS))
        if recursions < 2:
            raise OptionError(f"a router requires recursions >= 2, got {recursions}")
        if self.capacity is not None and len(self.capacity) != recursions:
            got = f"got {len(self.capacity)} for {recursions} recursions"
            raise OptionError(f"capacity must have one entry per recursion: {got}")
        method = ROUTERS[self.kind]
        others = {name for kind in ROUTERS.values() for name in kind.options} - set(method.options)
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        for name in (name for name in given if name in others):
            raise OptionError(f"{name} cannot be combined with {self.kind}-choice routing")
        score = self.score or method.scores[0]
        chosen: dict[str, Any] = {"score": score, "alpha": method.default_alpha(score)}
        chosen |= {"capacity": falling_parts(recursions)} | given
        return Routing(**chosen | {"capacity": tuple(float(part) for part in chosen["capacity"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(RoutingSettings):
    """What decides how deep each token goes: `RouterOptions` with nothing left out."""

    def __post_init__(self) -> None:
        if self.kind not in ROUTERS:
            raise OptionError(choices("router", str(self.kind), ROUTERS))
        if self.score not in self.method.scores:
            raise OptionError(choices("score", str(self.score), self.method.scores))
        check(self)
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
        return to_record(self)

    @classmethod
    def from_dict(cls, record: object) -> Routing:
        return read_record(cls, record, "routing")


def build_routing(kind: str, recursions: int, **fields: Any) -> Routing:
    """A routing from fields of `RouterOptions`."""
    return RouterOptions(kind=kind, **fields).build(recursions)
