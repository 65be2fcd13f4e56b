"""The depth plan: one idea used everywhere.

A model is a set of unique layers and a plan that says which layer runs at which step. A plain Transformer is the plan
with one recursion; a recursive one loops its core. The model, the cache, the cost counter and the converter all walk a
plan; nothing else counts layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from fathomlm.depth.bounds import read_record, size, to_record
from fathomlm.depth.routing import Routing
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.depth.steps import Resize, Step, checked, core_and_ends, lay
from fathomlm.errors import OptionError, PlanError, choices
from fathomlm.options import check

KVMode = Literal["cache", "share", "hybrid"]
"""Whose keys and values a step attends to: its own, for the tokens that run it; those of the first use of its layer; or
those with its own written over them (thesis 4.3.3, and its appendix on KV sharing)."""
KV_MODES: tuple[str, ...] = get_args(KVMode)
DEFAULT_RECURSIONS = 2
"""Of a model that is to be looped, where nobody says how often."""


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """Unique layers laid out over an unrolled depth. Make one with `DepthPlan.build` or `DepthPlan.vanilla`.

    Its fields are the few that files have, and its steps follow from them.
    """

    sharing: str
    recursions: int = size("recursions")
    base_layers: int = size("base_layers")
    """How many layers the untied base has."""
    unrolled_layers: int = size("unrolled_layers")
    """How many steps there are; not as many as the base has where recursions do not divide that (`build`, resize)."""
    exits: tuple[int, ...] = ()
    """The steps after which a token may exit early, through the final norm and the head; the last step is no early exit."""
    exit_layer: bool = False
    """Whether each exit has a layer of its own, which only what is chosen there runs through (`exit_steps`)."""
    exit_gate: bool = False
    """Whether one learned gate says at every exit how likely a token exits there (Ouro)."""
    draft: bool = False
    """Whether a draft layer stands behind the last step (`draft_step`), instead of exits between steps."""
    loop_norm: bool = False
    """Whether the final norm also stands between two recursions, so that a loop reads what the head would read (Nanbeige,
    Ouro)."""
    injection: bool = False
    """Whether each recursion begins with a linear over its input and the prelude's output side by side (Huginn). The first
    one's input is a start state: zeros, or noise."""
    core_norm: bool = False
    """Whether the final norm also stands behind the last recursion, in front of the coda (Huginn)."""
    ends: tuple[int, int] = None  # type: ignore[assignment]
    """How many layers the prelude and the coda have; None makes it as many as the strategy keeps apart."""
    kv: KVMode = "cache"
    kv_sharing: str | None = None
    """How a plain model's layers share keys and values: cycle, sequence, ...; a looped one shares as its weights do."""
    kv_loops: int = size("kv_loops", 1)
    """How many of a plain model's layers read the same entries."""
    routing: Routing | None = None
    """What chooses each token's depth; None runs every token to the end."""
    steps: tuple[Step, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, inside=False)
        base, unrolled = self.base_layers, self.unrolled_layers
        resize: Resize | None = None if base == unrolled else ("add" if unrolled > base else "drop")
        unique, ends = core_and_ends(self.sharing, self.recursions, base, resize, self.ends)
        if sum(ends) + unique * self.recursions != unrolled:
            total = sum(ends) + unique * self.recursions
            raise PlanError(f"the plan says {unrolled} unrolled layers, its other fields give {total}")
        object.__setattr__(self, "ends", ends)
        object.__setattr__(self, "steps", tuple(lay(self.sharing, self.recursions, base, unique, ends)))
        object.__setattr__(self, "exits", tuple(sorted(set(self.exits))))
        self._check()
        _ = self.kv_sources, self.unique_layers  # now: a cached property takes a lock, which no compiler can follow

    def _check(self) -> None:
        for index in self.exits:
            if not 0 <= index < self.unrolled_layers - 1:
                last = self.unrolled_layers - 1
                raise PlanError(f"an exit goes after one of the steps 1 to {last} of {last + 1}, got {index + 1}")
        if self.kv not in KV_MODES:
            raise PlanError(choices("kv mode", self.kv, KV_MODES))
        if self.kv_sharing is not None:
            if self.kv_sharing not in STRATEGIES:
                raise PlanError(choices("kv sharing strategy", self.kv_sharing, STRATEGIES))
            core = self.unrolled_layers - 2 * STRATEGIES[self.kv_sharing].kept_apart
            if self.kv_loops > 1 and core % self.kv_loops:
                fits = ", ".join(str(n) for n in range(2, core + 1) if core % n == 0)
                raise PlanError(f"{self.kv_loops} kv loops do not divide {core} layers; these do: {fits}")
        plain_share = self.kv == "share" and self.recursions == 1
        if plain_share != (self.kv_sharing is not None) or plain_share != (self.kv_loops > 1):
            if plain_share:
                raise PlanError("KV sharing on a plain model requires a strategy, such as cycle, and >= 2 loops")
            raise PlanError(
                "a kv sharing strategy requires kv mode 'share' on a plain model; looped "
                "models share the KV cache as they share weights"
            )
        if self.kv == "hybrid" and self.routing is None:
            raise PlanError("kv mode 'hybrid' requires a router: it keeps shared entries for tokens that stopped early")
        if self.exit_layer and not self.exits:
            raise PlanError("exit_layer requires exits")
        if self.exit_gate and not self.exits:
            raise PlanError("exit_gate requires exits")
        if self.draft and (self.exits or self.routing is not None or self.injection):
            raise PlanError("a draft layer cannot be combined with exits, a router or an injection")
        if self.loop_norm and not (self.loops and self.recursions > 1):
            raise PlanError("loop_norm requires a looped core (cycle or middle-cycle) of 2 or more recursions")
        if self.injection and not self.loops:
            raise PlanError(f"injection requires a looped core (cycle or middle-cycle), not {self.sharing}")
        if self.core_norm and self.steps[-1].part != "coda":
            raise PlanError("core_norm requires a coda")
        if self.injection and (self.exits or self.routing is not None or self.kv != "cache"):
            raise PlanError("injection cannot be combined with exits in the plan, a router or shared keys and values")
        if self.routing is None:
            return
        if not self.loops:
            raise PlanError(f"a router requires a looped core (cycle or middle-cycle), not {self.sharing}")
        if self.routing.recursions != self.recursions:
            raise PlanError(f"the routing is for {self.routing.recursions} recursions, the plan has {self.recursions}")
        if self.exits:
            raise PlanError("early exits cannot be combined with a router, which already chooses each token's depth")
        if self.kv != "cache" and not self.routing.method.takes_all_first(self.routing):
            raise PlanError(f"kv mode '{self.kv}' reads the first recursion's entries, so its capacity must be 1")

    @classmethod
    def vanilla(cls, layers: int) -> DepthPlan:
        """Every layer its own, once: the plan of a plain Transformer."""
        return cls.build("cycle", 1, layers)

    @classmethod
    def build(
        cls,
        sharing: str,
        recursions: int,
        base_layers: int,
        resize: Resize | None = None,
        ends: tuple[int, int] | None = None,
    ) -> DepthPlan:
        """Lay `sharing` with `recursions` over a base of `base_layers`.

        `ends` are how many layers a middle-* strategy keeps apart in front of its core and behind it, one each by default.

        `resize` changes the unrolled depth where it does not divide: "add" rounds it up, as the thesis does for its MoR
        models (30 -> 1+10+1 looped three times, 32 -> 34 for four); "drop" rounds it down, as in its sharing tables.
        """
        unique, both = core_and_ends(sharing, recursions, base_layers, resize, ends)
        unrolled = sum(both) + unique * recursions
        return cls(sharing=sharing, recursions=recursions, base_layers=base_layers, unrolled_layers=unrolled, ends=both)

    @cached_property
    def unique_layers(self) -> int:
        return 1 + max(step.layer for step in self.steps)

    @cached_property
    def core_layers(self) -> int:
        return len({step.layer for step in self.steps if step.part == "core"})

    @property
    def layout(self) -> str:
        """Unique layers as the thesis writes them: "15", or "1+10+1" with a prelude and a coda."""
        prelude, coda = self.ends
        return f"{prelude}+{self.core_layers}+{coda}" if prelude else str(self.core_layers)

    @property
    def loops(self) -> bool:
        """Whether the core is one block run again and again in one order, so that routers and exits fit between."""
        return STRATEGIES[self.sharing].loops

    @property
    def plain(self) -> bool:
        """Whether every layer is its own and runs once."""
        return self.recursions == 1 and not self.injection

    @property
    def whole_passes(self) -> bool:
        """Whether a recursion runs the whole core before the next begins, so that a recursion has an output."""
        return STRATEGIES[self.sharing].whole_passes

    def with_exits(self, exits: Iterable[int], *, layer: bool = False, gate: bool = False, draft: bool = False) -> DepthPlan:
        """The same plan, with exits after these steps (by index, from 0), each with a `layer` of its own or without, and a
        `gate` for all of them or none; or with a `draft` layer and no exits."""
        return dataclasses.replace(self, exits=tuple(exits), exit_layer=layer, exit_gate=gate, draft=draft)

    def exit_steps(self, exits: Iterable[int]) -> tuple[Step, ...]:
        """What the exits after these steps run of their own, beside the plan's steps. Nothing where an exit has no layer.

        Such a step reads the residual stream at its exit, in place of the step behind it, and keeps keys and values of its
        own; no other step reads what it makes. Indices and layers count on from the plan's."""
        own = [index for index in exits if self.exit_layer and index in self.exits]
        places = ((self.exits.index(index), self.steps[index + 1].origin) for index in own)
        return tuple(Step(self.unrolled_layers + i, self.unique_layers + i, 0, "exit", origin) for i, origin in places)

    @property
    def draft_step(self) -> Step:
        """What a draft layer runs, beside the plan's steps as an exit's own step is: in the place of the last layer, over
        each token's embedding and the last state of the token before it, with keys and values of its own."""
        assert self.draft
        return Step(self.unrolled_layers, self.unique_layers, 0, "exit", self.steps[-1].origin)

    def with_kv(self, kv: KVMode, sharing: str | None = None, loops: int = 1) -> DepthPlan:
        """The same plan with keys and values shared in another way."""
        return dataclasses.replace(self, kv=kv, kv_sharing=sharing, kv_loops=loops)

    def with_routing(self, routing: Routing | None) -> DepthPlan:
        """The same plan with a router between recursions, or without one."""
        return dataclasses.replace(self, routing=routing)

    def with_loop_norm(self) -> DepthPlan:
        """The same plan with the final norm between recursions too."""
        return dataclasses.replace(self, loop_norm=True)

    def with_injection(self, *, norm: bool = False) -> DepthPlan:
        """The same plan with an injection at the beginning of each recursion, and with or without the final norm in front of
        the coda."""
        return dataclasses.replace(self, injection=True, core_norm=norm)

    def with_recursions(self, recursions: int) -> DepthPlan:
        """The same layers looped another number of times. Exits after each loop stay so."""
        if self.plain or not self.loops or self.routing is not None or self.kv != "cache":
            raise PlanError("another number of loops requires a looped model without a router or shared keys and values")
        checked("recursions", recursions, called="loops")
        after_each = bool(self.exits) and self.exits == self.recursion_ends()
        if self.exits and not (after_each and recursions > 1):
            raise PlanError("another number of loops cannot be combined with exits, except after each of 2 or more loops")
        layers = sum(self.ends) + recursions * self.core_layers
        built = DepthPlan.build(self.sharing, recursions, checked("base_layers", layers, called="layers"), ends=self.ends)
        looped = dataclasses.replace(
            built, injection=self.injection, core_norm=self.core_norm, loop_norm=self.loop_norm and recursions > 1
        )
        if not after_each:
            return looped
        return looped.with_exits(looped.recursion_ends(), layer=self.exit_layer, gate=self.exit_gate)

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each step, the step whose keys and values it starts from: itself, or an earlier one."""
        if self.kv == "cache":
            return tuple(range(self.unrolled_layers))
        if self.kv_sharing is None:
            return tuple(self.uses(step.layer)[0].index for step in self.steps)
        strategy = STRATEGIES[self.kv_sharing]
        ends = strategy.kept_apart
        core = self.unrolled_layers - 2 * ends
        groups = strategy.order(core // self.kv_loops, self.kv_loops)
        first = [ends + groups.index(group) for group in groups]
        return (*range(ends), *first, *range(ends + core, self.unrolled_layers))

    def reads_kv(self, step: Step) -> bool:
        """Whether a step makes no keys and values of its own."""
        return self.kv == "share" and step.part != "exit" and self.kv_sources[step.index] != step.index

    def check_recompute(self, how: str) -> None:
        """Refuse activation checkpointing where a step's entries are read after it."""
        if how not in ("none", "inner") and self.kv != "cache":
            raise OptionError(f"recompute: {how} cannot be combined with kv mode '{self.kv}': its entries outlive a step")

    def recursion_steps(self, recursion: int) -> tuple[Step, ...]:
        """The core's steps in one recursion, in order."""
        return tuple(step for step in self.steps if step.part == "core" and step.recursion == recursion)

    def recursion_ends(self) -> tuple[int, ...]:
        """The steps that end a recursion, the last recursion left out: where a recursive model may be exited early."""
        if not self.whole_passes:
            raise PlanError(
                f"recursions have no outputs under {self.sharing}; exits require cycle, middle-cycle or cycle-rev"
            )
        ends = [step for step in self.steps if self.is_last_of_recursion(step)]
        return tuple(step.index for step in ends if step.recursion < self.recursions - 1)

    def is_shared(self, step: Step) -> bool:
        """Whether other steps run this step's layer too."""
        return step.part == "core" and self.recursions > 1

    def uses(self, layer: int) -> tuple[Step, ...]:
        """The steps that run a layer, in order."""
        return tuple(step for step in self.steps if step.layer == layer)

    def is_last_of_recursion(self, step: Step) -> bool:
        """Whether a pass through the core ends with this step."""
        after = self.steps[step.index + 1] if step.index + 1 < len(self.steps) else None
        return step.part == "core" and (after is None or after.part != "core" or after.recursion != step.recursion)

    def begins_recursion(self, step: Step) -> bool:
        """Whether a pass through the core begins with this step."""
        before = self.steps[step.index - 1] if 0 < step.index < len(self.steps) else None
        return step.part == "core" and (before is None or before.part != "core" or before.recursion != step.recursion)

    def norms_before(self, step: Step) -> bool:
        """Whether the stream goes through the final norm in front of a step: between two recursions, or behind the last."""
        if step.part == "coda":
            return self.core_norm and self.steps[step.index - 1].part == "core"
        return self.loop_norm and step.recursion > 0 and self.begins_recursion(step)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """What files have of it; what is as usual is left out."""
        record = to_record(self, [field.name for field in dataclasses.fields(self)][4:])
        apart = STRATEGIES[self.sharing].kept_apart
        if self.ends == (apart, apart):
            del record["ends"]
        return record | ({} if self.routing is None else {"routing": self.routing.to_dict()})

    @classmethod
    def from_dict(cls, record: object) -> DepthPlan:
        return read_record(cls, record, "plan", error=PlanError)
