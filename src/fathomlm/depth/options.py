"""What may be asked of a depth plan: which layers are tied, what each step adds, who routes tokens. Commands take these as
flags, recipes as fields; what a model has in the end is a `DepthPlan`, a `Relaxation` and a `Routing`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fathomlm.depth.architecture import Architecture, LinearSpec
from fathomlm.depth.plan import DEFAULT_RECURSIONS, DepthPlan, KVMode
from fathomlm.depth.relaxation import DEFAULT_PREFIX_LENGTH, DEFAULT_RANK, RELAXATIONS, Relaxation, build_relaxation
from fathomlm.depth.routing import RouterOptions
from fathomlm.depth.routing.kind import Network, Update
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.depth.steps import Resize
from fathomlm.errors import OptionError
from fathomlm.options import like, option


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which layers are tied, and how often they run."""

    sharing: str | None = option(None, choices=tuple(STRATEGIES), help="which layers are tied", default_text="cycle")
    recursions: int | None = option(None, help="how often the shared block runs", default_text=str(DEFAULT_RECURSIONS))
    resize: Resize | None = option(
        None, const="add",
        help="where the recursions do not divide the layers, add steps (also --resize alone) or drop some",
    )  # fmt: skip

    @property
    def planned(self) -> bool:
        """Whether a plan is asked for; --resize alone changes one."""
        planned = self.sharing is not None or self.recursions is not None
        if self.resize is not None and not planned:
            raise OptionError("--resize requires --sharing or --recursions")
        return planned

    def build_plan(self, layers: int) -> DepthPlan:
        recursions = DEFAULT_RECURSIONS if self.recursions is None else self.recursions
        return DepthPlan.build(self.sharing or "cycle", recursions, layers, self.resize)

    def over(self, architecture: Architecture, own: DepthPlan | None) -> tuple[Architecture, DepthPlan]:
        """What is laid over a model's shape, in place of its own plan; a model whose loops begin with an injection keeps its
        layers, and loops another number of times."""
        if own is None or not own.injection:
            return architecture, self.build_plan(architecture.layers)
        if self.recursions is None or self.sharing is not None or self.resize is not None:
            raise OptionError(f"a {architecture.family} model takes --recursions, and neither --sharing nor --resize")
        plan = own.with_recursions(self.recursions)
        return dataclasses.replace(architecture, layers=plan.unrolled_layers), plan


@dataclass(frozen=True, kw_only=True)
class RelaxOptions:
    """What each step adds to the layer that it shares."""

    relax: str | None = option(None, choices=tuple(RELAXATIONS), help="what each step adds", default_text="nothing")
    rank: int | str | None = option(
        None, metavar="K", default_text=str(DEFAULT_RANK),
        help="lora, dora: one rank, or pairs such as q=64,kv=128,ffn=256, where other linears get none",
    )  # fmt: skip
    linears_only: bool = option(False, help="lora, dora: leave norms and biases tied, as the thesis does")
    prefix_length: int | None = option(None, help="prefix: vectors per step", default_text=str(DEFAULT_PREFIX_LENGTH))

    def build_relaxation(self, linears: tuple[LinearSpec, ...]) -> Relaxation | None:
        return build_relaxation(linears, self.relax, self.rank, self.prefix_length, linears_only=self.linears_only)


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """How tokens are given their depth, and whose keys and values they attend to. In recipes the router has fields of its
    own (`RouterOptions`)."""

    router: str | None = like(RouterOptions, "kind", None)
    router_network: Network | None = like(RouterOptions, "network")
    router_score: str | None = like(RouterOptions, "score")
    router_alpha: float | None = like(RouterOptions, "alpha", default_text="2 with interpolate and sigmoid, 0.1 with add")
    router_update: Update | None = like(RouterOptions, "update", default_text="interpolate")
    kv: KVMode | None = option(
        None, default_text="cache",
        help="KV cache: every recursion's own (cache), the first one's (share), or both (hybrid, with a router)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.router is None:
            for name in self._given:
                raise OptionError(f"--router-{name} requires --router")

    @property
    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, f"router_{name}") for name in ("network", "score", "alpha", "update")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def routing(self) -> dict[str, Any] | None:
        """What `convert` calls `router`."""
        return None if self.router is None else {"kind": self.router, **self._given}
