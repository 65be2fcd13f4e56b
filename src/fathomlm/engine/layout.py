"""Where each step's keys and values live: which page table of a sequence, and which plane of the pages it draws.

    whole     every token runs every step: one table, a plane for each step that makes entries
    exits     tokens exit early and their deeper entries come later, at the same places: as above, and a plane for each
              exit with a layer of its own
    routed    recursion-wise entries: a table for prelude and coda, where every token has an entry, and one for each
              recursion, where only the tokens that ran it do (thesis 4.3.3). With shared entries the first recursion's
              serve all of them, and every token has those: one table. With hybrid ones every token has an entry in each
              recursion, its own or the first one's: one table, and planes for each recursion

What an encoder made of a source is in pages too, for each step in the plane of its number. So is a trained prefix, in the
plane of the entries that its step looks at.

A plane is one layer's part of a page. Tables of one pool exchange pages, so the recursions of one block share a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from fathomlm.depth import Architecture, DepthPlan, Relaxation, Step
from fathomlm.errors import UnsupportedModel

Kind = Literal["whole", "routed", "exits"]


class Stride(NamedTuple):
    """From a step of one segment to the one in its place in the next."""

    recursions: int
    planes: int
    """0 where both look at the same entries."""


@dataclass(frozen=True, slots=True)
class Layout:
    kind: Kind
    tables: tuple[int, ...]
    """The pool of each table. The first table has an entry for every token."""
    planes: tuple[int, ...]
    """By pool."""
    homes: Mapping[int, tuple[int, int]]
    """By step, those of exits too: its pool, and its plane there. A step that reads another's entries has that one's."""
    recursion_tables: tuple[int, ...] = ()
    """routed: the table of each recursion."""
    positioned: tuple[int, ...] = ()
    """Pools that keep the position of each entry, since windows and relative positions count positions: where not every
    token has an entry."""

    def home(self, step: Step) -> tuple[int, int]:
        return self.homes[step.index]

    def prefix_numbers(self) -> dict[int, int]:
        """By step: how many steps before it have its home. They look at the same entries, or at those of other tables, but
        a trained prefix is each step's own."""
        numbers, met = dict[int, int](), Counter[tuple[int, int]]()
        for index in sorted(self.homes):
            numbers[index] = met[self.homes[index]]
            met[self.homes[index]] += 1
        return numbers

    def added(self, depth: int) -> tuple[int, ...]:
        """By table: the entries that a token adds; where recursions have tables of their own, one of this depth."""
        if self.kind != "routed":
            return (1,)
        deep = self.recursion_tables[:depth]
        return tuple(int(table in deep or table not in self.recursion_tables) for table in range(len(self.tables)))

    def shift(self, steps: Sequence[Step], twins: Sequence[Step]) -> int | None:
        """How many planes on from each step's its twin's entries are; 0 where both look at the same ones. None where no one
        number is true of all of them."""
        homes = [(self.home(step), self.home(twin)) for step, twin in zip(steps, twins, strict=True)]
        found = {plane[1] - own[1] if plane[0] == own[0] else None for own, plane in homes}
        return found.pop() if len(found) == 1 else None

    def stride(self, plan: DepthPlan, segments: Sequence[Sequence[Step]]) -> Stride | None:
        """From one segment to the next, where rows of all of them can share a pass: the layers are the same in the same
        order, and one number of recursions and one of planes lead from each step on to its twin. Windows and angles may
        differ (`row_positions`)."""
        first, found = segments[0], set()
        for before, steps in pairwise(segments):
            if [step.layer for step in first] != [step.layer for step in steps]:
                return None
            twins = list(zip(before, steps, strict=True))
            planes = self.shift(before, steps)
            recursions = {twin.recursion - step.recursion for step, twin in twins}
            if len(recursions) != 1 or planes is None or {plan.reads_kv(step) for step in steps} != {planes == 0}:
                return None
            found.add(Stride(recursions.pop(), planes))
        return found.pop() if len(found) == 1 else None


def build_layout(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    exits: Sequence[int] = (),
    own: Sequence[Step] | None = None,
    static: bool = False,
) -> Layout:
    """The layout that a model needs, or what the engine cannot do with it. Tokens may exit after the steps with the indices
    `exits`; `own` are the steps of a draft layer, by default those of the exits. `static`: all of them do."""
    own = plan.exit_steps(exits) if own is None else own
    _check(plan, relaxation, exits)
    if plan.routing is None or plan.kv != "cache":
        steps = (*plan.steps[: exits[0] + 1 if static else None], *own)
        makes = [step.index for step in steps if not plan.reads_kv(step)]
        planes = {index: number for number, index in enumerate(makes)}
        homes = {
            step.index: (0, planes[plan.kv_sources[step.index] if plan.reads_kv(step) else step.index]) for step in steps
        }
        kind: Kind = "routed" if plan.routing is not None else ("exits" if (exits or own) and not static else "whole")
        most = max(len(makes), len(plan.steps)) if architecture.cross else len(makes)
        return Layout(kind, (0,), (most,), homes, (0,) * plan.recursions)
    outer = [step.index for step in plan if step.part != "core"]
    first = min(step.layer for step in plan if step.part == "core")
    pool = 1 if outer else 0
    homes = {s.index: (0, outer.index(s.index)) if s.part != "core" else (pool, s.layer - first) for s in plan}
    tables = (*((0,) if outer else ()), *[pool] * plan.recursions)
    planes_by_pool = [*((len(outer),) if outer else ()), plan.core_layers]
    if architecture.cross:
        planes_by_pool[0] = max(planes_by_pool[0], len(plan.steps))
    windowed = any(architecture.window(step.origin) is not None for step in plan if step.part == "core")
    placed = windowed or architecture.positions == "relative"
    recursion_tables = tuple(range(pool, pool + plan.recursions))
    return Layout("routed", tables, tuple(planes_by_pool), homes, recursion_tables, (pool,) if placed else ())


def pool_shares(plan: DepthPlan, layout: Layout) -> list[float]:
    """How many pages of each pool a sequence takes, by the depths that its routers were trained for."""
    if plan.routing is None or len(layout.planes) == 1:
        return [float(layout.tables.count(pool)) for pool in range(len(layout.planes))]
    return [1.0, sum(plan.routing.capacity)]


def _check(plan: DepthPlan, relaxation: Relaxation | None, exits: Sequence[int]) -> None:
    if relaxation is not None and not relaxation.method.serves:
        raise UnsupportedModel(f"the engine does not support a {relaxation.kind} relaxation; use fathomlm generate")
    if plan.routing is not None and not plan.routing.method.serves:
        raise UnsupportedModel(f"the engine does not support a {plan.routing.kind} router; use fathomlm generate")
    if plan.routing is None:
        return
    if exits:
        raise UnsupportedModel("a routed model's router already chooses each token's depth; it has no exits")
    if not plan.routing.method.takes_all_first(plan.routing):
        raise UnsupportedModel("the engine requires a first recursion that every token runs (capacity 1)")
