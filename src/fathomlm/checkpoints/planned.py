"""What a conversion will make, as far as shapes and options say: the plan, what steps add, and where both start.

`convert` lays it out before it reads weights. What is measured over text first, perhaps for hours, is asked for only where
`check_conversion` has laid it out already.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fathomlm.checkpoints.tied import check_room_for_ranks
from fathomlm.checkpoints.tying import CALIBRATED, INITS, MEANS, NORM_INITS, Init, NormInit
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.depth.cost import count
from fathomlm.depth.dropping import check_repeat, kept_layers, repeated_plan, with_neurons
from fathomlm.depth.plan import DEFAULT_RECURSIONS, KVMode
from fathomlm.depth.relaxation import RELAXATIONS, build_relaxation, check_fits, kinds_with
from fathomlm.depth.relaxation.kind import RelaxationKind
from fathomlm.depth.routing import ROUTERS, RouterOptions
from fathomlm.depth.steps import Resize
from fathomlm.errors import OptionError, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class TyingOptions:
    """What `convert` is asked for beside the layers and neurons that are left out; see there."""

    repeat: int | None = None
    sharing: str | None = None
    recursions: int | None = None
    init: str | None = None
    norm_init: str | None = None
    relax: str | None = None
    rank: int | str | dict[str, int] | None = None
    relax_init: str | None = None
    prefix_length: int | None = None
    linears_only: bool = False
    resize: bool | Resize | None = None
    router: str | dict[str, Any] | None = None
    kv: KVMode | None = None
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedConversion:
    """What is made of a base whose layers and neurons have been left out already."""

    plan: DepthPlan
    routed: DepthPlan
    """The same with the router and the sharing of keys and values."""
    relaxation: Relaxation | None
    """Under a budget its ranks are yet to be chosen."""
    start: Start
    limit: int | None
    """How many parameters a budget leaves."""


def check_conversion(
    shape: Architecture, *, drop: int | None, neurons: int | None, calibrated: bool, **options: Any
) -> None:
    """Refuse what cannot be made of a plain model of that shape with such `TyingOptions`."""
    asked, left = TyingOptions(**options), shape
    times = check_dropping(drop, neurons, asked)
    if drop is not None:
        left = shape.with_layers(kept_layers(shape.layers, drop, "stepwise"))
        left = left if neurons is None else with_neurons(left, neurons)
    lay_out(left, asked, times=times, whole=shape, calibrated=calibrated)


def lay_out(
    shape: Architecture, asked: TyingOptions, *, times: int, whole: Architecture, calibrated: bool
) -> PlannedConversion:
    """Plan, relaxation and starts over a plain model of that shape; `whole` is the model that a budget is a part of, `times`
    what `check_dropping` returned."""
    check_one(times, asked.init, asked.norm_init, asked.resize)
    limit = None if asked.budget is None else _limit(asked.budget, whole, asked.relax, asked.rank)
    init = asked.init
    if asked.repeat is not None:
        check_repeat(shape, asked.repeat)
        plan, init, calibrated = repeated_plan(shape.layers, asked.repeat), "average", False
    else:
        resize = "add" if asked.resize is True else asked.resize or None
        plan = DepthPlan.build(asked.sharing or "cycle", times, shape.layers, resize)
    routed = routed_plan(plan, asked.router, asked.kv)
    linears, only = shape.linears(), asked.linears_only
    relaxation = build_relaxation(linears, asked.relax, asked.rank, asked.prefix_length, linears_only=only)
    check_fits(relaxation, plan)
    start = Start.of(init, asked.norm_init, asked.relax_init, asked.relax, calibrated)
    if limit is not None and relaxation is not None:
        if start.init == "random":
            raise OptionError("budget chooses ranks by what tying loses; it cannot be combined with the init random")
        check_room_for_ranks(shape, plan, relaxation, limit)
    return PlannedConversion(plan=plan, routed=routed, relaxation=relaxation, start=start, limit=limit)


def check_dropping(drop: int | None, neurons: int | None, asked: TyingOptions) -> int:
    """Refuse what does not go together. Returns how often shared layers run."""
    repeat, sharing, recursions = asked.repeat, asked.sharing, asked.recursions
    plain = drop is not None and sharing is None
    times = recursions if recursions is not None else 1 if plain else DEFAULT_RECURSIONS
    for name in (name for name, value in (("neurons", neurons), ("repeat", repeat)) if value is not None and drop is None):
        raise OptionError(f"{name} requires drop, which may be 0")
    if neurons is not None and times != 1:
        raise OptionError("neurons cannot be combined with sharing or recursions: what is tied afterwards was not measured")
    if repeat is not None:
        if repeat < 2:
            raise OptionError(f"repeat must be >= 2, got {repeat}")
        others = {
            "sharing": sharing,
            "recursions": None if recursions == 1 else recursions,
            "init": asked.init,
            "relax": asked.relax,
        }
        for name in (name for name, value in others.items() if value is not None):
            raise OptionError(f"repeat ties the layers that are left in its own way; it cannot be combined with {name}")
    return times


def check_one(recursions: int, init: str | None, norm_init: str | None, resize: bool | Resize | None) -> None:
    """Refuse what says how layers are tied where none are. A random start is drawn at one recursion too."""
    if recursions != 1:
        return
    for name, value in (("init", None if init == "random" else init), ("norm_init", norm_init), ("resize", resize or None)):
        if value is not None:
            raise OptionError(f"{name} says how layers are tied, and at 1 recursion none are: leave it out")


def routed_plan(plan: DepthPlan, router: str | dict[str, Any] | None, kv: KVMode | None) -> DepthPlan:
    """`plan` with a router and with keys and values shared as asked, over weights that were trained without."""
    if router is not None:
        options: dict[str, Any] = dict(router) if isinstance(router, dict) else {"kind": router}
        known = [field.name for field in fields(RouterOptions)]
        for name in (name for name in options if name not in known):
            raise OptionError(choices("field of a router", name, known))
        if "kind" not in options:
            raise OptionError(f"the router is missing 'kind': {' or '.join(ROUTERS)}")
        kind = str(options.pop("kind"))
        options = ROUTERS[kind].conversion(options) if kind in ROUTERS else options
        plan = plan.with_routing(build_routing(kind, plan.recursions, **options))
    return plan if kv is None else plan.with_kv(kv)


@dataclass(frozen=True, slots=True)
class Start:
    """The initialisations, checked."""

    init: Init
    norm: NormInit
    relax: str

    @classmethod
    def of(
        cls,
        init: str | None,
        norm_init: str | None,
        relax_init: str | None,
        relax: str | None,
        calibrated: bool,
    ) -> Start:
        method = RelaxationKind() if relax is None else RELAXATIONS[relax]
        init = init or ("influence" if calibrated and method.init == "stepwise" else method.init)
        if relax_init is not None and not method.relax_inits:
            kinds = " or ".join(name for name, kind in RELAXATIONS.items() if kind.relax_inits)
            raise OptionError(f"relax-init requires a {kinds} relaxation")
        given = (("init", init, INITS), ("norm-init", norm_init, NORM_INITS), ("relax-init", relax_init, method.relax_inits))
        for what, value, known in given:
            if value is not None and value not in known:
                raise OptionError(choices(what, value, known))
        for what, value in (("init", init), ("relax-init", relax_init)):
            if not calibrated and value in CALIBRATED[what]:
                raise OptionError(f"{what} {value} requires calibration text (--calibrate FILE)")
        if norm_init is not None and init not in MEANS:
            raise OptionError(f"norm-init requires the init {' or '.join(MEANS)}; {init} brings its own norms")
        return cls(init, norm_init or "average", relax_init or ("aware" if calibrated else "svd"))  # type: ignore[arg-type]


def _limit(budget: float, architecture: Architecture, relax: str | None, rank: object) -> int:
    """How many parameters a budget leaves."""
    if not 0 < budget <= 1:
        raise OptionError(f"budget must be > 0 and <= 1, a part of the model's bytes; got {budget:g}")
    if relax is None or "ranks" not in RELAXATIONS[relax].options:
        raise OptionError(f"budget chooses ranks; it requires a {kinds_with('ranks')} relaxation")
    if rank is not None:
        raise OptionError("budget chooses ranks; it cannot be combined with rank")
    return int(budget * count(architecture, DepthPlan.vanilla(architecture.layers)).parameters)
