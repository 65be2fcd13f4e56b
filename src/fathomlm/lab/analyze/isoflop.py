"""How many tokens a budget buys: plain, recursive and routed models of the same base, side by side (thesis 4.4.2 "IsoFLOP
Analysis", its tables `tab_mor:main_results` and `tab_mor:scaling_laws`).

FLOPs are counted as the thesis counts them (`depth/cost.py`): forward only, without embedding and head. A recursive model
costs what its base costs, but for layers that are added where the recursions do not divide them; a routed one costs less,
so the same budget buys more tokens.

The thesis' printed budgets take k and v to be as wide as q, which three of its four bases do not have. `wide_kv` counts so
too, which brings the absolute numbers of tokens to the printed ones; ratios between rows hardly move with recursion-wise
caching.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import Cost, count
from fathomlm.depth.options import PlanOptions, RoutingOptions
from fathomlm.depth.plan import KVMode
from fathomlm.errors import OptionError
from fathomlm.lab.tables import Rows, amount
from fathomlm.options import like, option

NAMES = {"vanilla": "vanilla", "recursive": "rec.", "mor": "MoR"}
"""The kinds of models, and how tables call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsoRow:
    """One model under one budget."""

    base: str
    kind: str
    """vanilla, recursive or mor."""
    recursions: int
    layout: str
    """Unique layers, "32" or "1+10+1"."""
    unrolled_layers: int
    non_embedding_parameters: int
    budget: float
    """Forward FLOPs."""
    flops_per_token: int
    tokens: float
    """What the budget buys."""
    relative_tokens: float
    """Against the vanilla model of the same base."""
    flops_at_equal_tokens: float
    """What as many tokens cost as the budget buys for the vanilla model."""


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """What the recursive and routed rows of a table are."""

    sharing: str = like(PlanOptions, "sharing", "middle-cycle", default_text=None)
    router: str | None = like(RoutingOptions, "router", "expert", help="router of the MoR rows")
    kv: KVMode = like(RoutingOptions, "kv", "cache", help="KV cache of the MoR rows", default_text=None)
    context: int = option(2048, ge=1, help="tokens per sequence")

    @property
    def rows(self) -> dict[str, Any]:
        """These fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(PlannedRows)}


@dataclass(frozen=True, kw_only=True)
class IsoOptions(PlannedRows):
    recursions: tuple[int, ...] = (3,)
    wide_kv: bool = option(False, help="count k and v as wide as q, as the thesis' printed budgets do")

    def __post_init__(self) -> None:
        if not self.recursions or min(self.recursions) < 2:
            raise OptionError(f"recursions must be >= 2, got {', '.join(map(str, self.recursions)) or 'none'}")


def iso_rows(bases: Mapping[str, Architecture], budgets: Sequence[float], options: IsoOptions) -> list[IsoRow]:
    """For each base and budget the vanilla row, and a recursive and a routed one for each number of recursions."""
    for budget in budgets:
        if not budget > 0:
            raise OptionError(f"a budget must be > 0 FLOPs, got {budget:g}")
    rows = []
    for base, architecture in bases.items():
        widened = dataclasses.replace(architecture, kv_heads=architecture.heads) if options.wide_kv else architecture
        models = [_Model(*pair) for pair in zip(_costs(architecture, options), _costs(widened, options), strict=True)]
        for budget in budgets:
            rows += [model.row(base, models[0].flops, budget) for model in models]
    return rows


def _costs(architecture: Architecture, options: IsoOptions) -> list[tuple[str, int, Cost]]:
    context = options.context
    found = [("vanilla", 1, count(architecture, DepthPlan.vanilla(architecture.layers), context=context))]
    for recursions in options.recursions:
        plan = DepthPlan.build(options.sharing, recursions, architecture.layers, "add")
        found.append(("recursive", recursions, count(architecture, plan, context=context)))
        if plan.loops:  # a router sits between passes of one block
            routed = count(architecture, plan, router=options.router, kv=options.kv, context=context)
            found.append(("mor", recursions, routed))
    return found


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as it is, and with the widths that its FLOPs are counted at."""

    true: tuple[str, int, Cost]
    counted: tuple[str, int, Cost]

    @property
    def flops(self) -> int:
        return self.counted[2].forward_flops_per_token

    def row(self, base: str, plain_flops: int, budget: float) -> IsoRow:
        kind, recursions, cost = self.true
        return IsoRow(
            base=base,
            kind=kind,
            recursions=recursions,
            layout=cost.layout,
            unrolled_layers=cost.unrolled_layers,
            non_embedding_parameters=cost.non_embedding_parameters,
            budget=budget,
            flops_per_token=self.flops,
            tokens=budget / self.flops,
            relative_tokens=plain_flops / self.flops,
            flops_at_equal_tokens=budget * self.flops / plain_flops,
        )


def iso_table(rows: Sequence[IsoRow]) -> Rows:
    """The thesis' columns: what a budget buys, and (equal) what as many tokens cost as the vanilla model gets."""
    header = ["base", "model", "layers", "params", "EFLOPs", "tokens", "ratio", "equal"]
    return [header, *(_iso_row(row) for row in rows)]


def _iso_row(row: IsoRow) -> list[str]:
    return [
        row.base,
        NAMES[row.kind] if row.kind == "vanilla" else f"{NAMES[row.kind]} {row.recursions}",
        row.layout,
        amount(row.non_embedding_parameters),
        f"{row.budget / 1e18:.4g}",
        amount(row.tokens),
        f"{row.relative_tokens:.3f}",
        f"{row.flops_at_equal_tokens / 1e18:.4g}",
    ]
