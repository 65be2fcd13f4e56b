"""What the device's three programs do to rows, without tensors: who runs in which pass, and when a token is chosen.

Each is the twin of a program of `engine.programs`, which says why things are as they are. Here a token's depth is known
beforehand, from its trajectory. Tests hold them against the engine tick by tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fathomlm.engine.schedule import PrefillChunk, SchedulerOutput
from fathomlm.kernels.routed_rows import CORE, ENTER, IDLE
from fathomlm.lab.simulate.costs import Pass
from fathomlm.lab.simulate.trajectories import Trajectory

DEEP, FLUSH = 1, 2
LONG_AGO = -(10**12)


@dataclass(slots=True)
class Slot:
    """One text on the device."""

    number: int
    id: int
    epoch: int
    text: Trajectory
    made: int
    position: int
    stage: int
    since: int
    entries: list[int]
    rooms: list[int]
    depth: int = 0
    """loop: how deep the token in the slot has come."""
    pending: int = 0
    """exits: tokens that wait to run behind the exit."""

    @property
    def wanted(self) -> int:
        """How deep the token in the slot goes."""
        return self.text.depths[self.made]

    def choose(self) -> Heard:
        """The token in the slot is through: the next one takes its place, or the text is over."""
        heard = Heard(self.id, self.epoch, self.wanted, len(self.text.depths) == self.made + 1)
        self.made += 1
        self.position += 1
        if heard.ended:
            self.stage = IDLE
        return heard


@dataclass(frozen=True, slots=True)
class Heard:
    """A token that was chosen."""

    id: int
    epoch: int
    depth: int
    ended: bool


@dataclass(slots=True)
class Tick:
    passes: list[Pass] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)


class Device(Protocol):
    rows: int

    def apply(self, plan: SchedulerOutput, texts: Mapping[int, Trajectory]) -> None: ...

    def read(self, chunk: PrefillChunk) -> list[int]: ...

    def tick(self) -> Tick: ...

    def entries(self, before: Sequence[int], length: int, depth: int) -> list[int]: ...


class Slots:
    """What all devices do alike: carry out plans and read prompts."""

    def __init__(self, tables: int, rows: int) -> None:
        self.rows, self._tables = rows, tables
        self.slots: dict[int, Slot] = {}
        self.clock = 0
        self._arrivals = 0

    def apply(self, plan: SchedulerOutput, texts: Mapping[int, Trajectory]) -> None:
        """Everything of a plan but its chunks."""
        for number in plan.stops:
            self.slots.pop(number, None)
        for placement in plan.placements:
            sequence = placement.sequence
            self.slots[placement.slot] = Slot(
                number=placement.slot,
                id=sequence.id,
                epoch=placement.epoch,
                text=texts[sequence.id],
                made=len(sequence.tokens),
                position=sequence.length - 1,
                stage=ENTER if placement.ready else IDLE,
                since=LONG_AGO + self._arrivals,
                entries=list(placement.entries),
                rooms=[0] * self._tables,
            )
            self._arrivals += 1
        for (number, table), entries in plan.capacity.items():
            self.slots[number].rooms[table] = entries

    def read(self, chunk: PrefillChunk) -> list[int]:
        """Entries by table once a chunk is read."""
        slot = self.slots[chunk.slot]
        self._read(slot, chunk)
        if chunk.last:
            slot.stage = ENTER
        return list(slot.entries)

    def _read(self, slot: Slot, chunk: PrefillChunk) -> None:
        slot.entries = [chunk.first + chunk.count]

    def entries(self, before: Sequence[int], length: int, depth: int) -> list[int]:
        """By table, with the token that was chosen last; `length` counts the new one, which has not run."""
        return [length]

    def _oldest(self, waiting: list[Slot]) -> list[Slot]:
        """Those that have waited longest, in that order."""
        waiting.sort(key=lambda slot: (slot.since, slot.number))
        return waiting[: self.rows]


class WholeRows(Slots):
    """Every token runs everything, in a pass of its own slot's row (`programs.whole`)."""

    def __init__(self, rows: int) -> None:
        super().__init__(1, rows)

    def tick(self) -> Tick:
        heard = []
        for slot in self.slots.values():
            if slot.stage == ENTER and slot.entries[0] < slot.rooms[0]:
                slot.entries[0] += 1
                heard.append(slot.choose())
        return Tick([("step", len(heard))], heard)


class LoopRows(Slots):
    """Tokens run one block as often as they are deep, rows of all depths together (`programs.routed`).

    With `own` entries each recursion has a table, `recursion_tables[r]`, where only the tokens that ran it have an entry;
    `outer` says that there is a table in front of those, for layers that every token runs. Otherwise there is one table.
    """

    def __init__(
        self,
        rows: int,
        cores: Sequence[int] = (1,),
        *,
        recursions: int,
        own: bool = False,
        outer: bool = False,
        at_once: bool = False,
    ) -> None:
        """`cores` are the passes of the block in front of each turn of a tick. `at_once`: a text that is placed stands in
        front of the block, where the engine brings it there with the next turn; so it is where blocks alone take time."""
        super().__init__(recursions + outer if own else 1, rows)
        self.cores = tuple(cores)
        self._own, self._outer = own, own and outer
        self._first = 1 if self._outer else 0
        """The table of the first recursion."""
        self._turn = CORE + recursions
        self._at_once = at_once

    def tick(self) -> Tick:
        tick = Tick()
        if self._at_once:
            for slot in self.slots.values():
                if slot.stage == ENTER and self._rank(slot, 0) < slot.rooms[0]:
                    slot.stage = CORE
        for passes in self.cores:
            for _ in range(passes):
                tick.passes.append(("core", self._core()))
            tick.passes.append(("turn", self._turn_over(tick.heard)))
        return tick

    def entries(self, before: Sequence[int], length: int, depth: int) -> list[int]:
        if not self._own:
            return [length]
        return [
            count + (table < self._first or table - self._first < depth) for table, count in enumerate(before)
        ]  # every token has an entry in the outer table

    def _read(self, slot: Slot, chunk: PrefillChunk) -> None:
        if not self._own:
            super()._read(slot, chunk)
            return
        depths = slot.text.depths
        for at in range(chunk.first, chunk.first + chunk.count):
            # How deep a prompt's tokens go is not in a trajectory: they go as deep as the text's own, one after the other.
            slot.entries = self.entries(slot.entries, 0, depths[at % len(depths)])

    def _rank(self, slot: Slot, table: int) -> int:
        return slot.entries[table] if self._own else slot.position

    def _core(self) -> int:
        waiting = []
        for slot in self.slots.values():
            if CORE <= slot.stage < self._turn:
                table = self._first + slot.stage - CORE if self._own else 0
                if self._rank(slot, table) < slot.rooms[table]:
                    waiting.append(slot)
        chosen = self._oldest(waiting)
        for slot in chosen:
            slot.depth = slot.stage - CORE + 1
            if self._own:
                slot.entries[self._first + slot.depth - 1] += 1
            slot.stage = CORE + slot.depth if slot.depth < slot.wanted else self._turn
            slot.since = self.clock
        self.clock += 1
        return len(chosen)

    def _turn_over(self, heard: list[Heard]) -> int:
        waiting = [
            slot
            for slot in self.slots.values()
            if slot.stage == self._turn or (slot.stage == ENTER and self._rank(slot, 0) < slot.rooms[0])
        ]
        chosen = self._oldest(waiting)
        for slot in chosen:
            if slot.stage == self._turn:
                if self._outer:
                    slot.entries[0] += 1
                heard.append(slot.choose())
            if slot.stage == IDLE:
                continue
            enters = self._rank(slot, 0) < slot.rooms[0]
            slot.stage = CORE if enters else ENTER
            if enters:
                slot.since = self.clock
        self.clock += 1
        return len(chosen)


class ExitRows(Slots):
    """Tokens leave after a first part or run on, and what left runs on later with others (`programs.exits`)."""

    def __init__(self, rows: int, *, mixed: bool, stack: int = 16, waits: bool = True, shallows: int = 1) -> None:
        """`mixed`: one block twice, so that rows of both parts share a pass. `waits`: what left has to run on, for its exact
        entries; at most `stack` tokens of a text wait."""
        super().__init__(1, rows)
        self.kinds = ("both",) if mixed else (*["shallow"] * shallows, "deep")
        self._waits = waits
        self._stack = min(stack, rows) if waits else 1

    def tick(self) -> Tick:
        tick = Tick()
        for kind in self.kinds:
            tick.passes.append((kind, self._pass(kind, tick.heard)))
        return tick

    def _pass(self, kind: str, heard: list[Heard]) -> int:
        waiting = []
        for slot in self.slots.values():
            if slot.stage in (DEEP, FLUSH):
                if kind != "shallow":
                    waiting.append(slot)
            elif slot.stage == ENTER and kind != "deep" and slot.position < slot.rooms[0]:
                waiting.append(slot)
        waiting.sort(key=lambda slot: (slot.since, slot.number))
        filled = 0
        for slot in waiting:
            size = slot.pending if slot.stage in (DEEP, FLUSH) else 1
            if filled + size > self.rows:
                break
            filled += size
            self._run(slot, heard)
            slot.since = self.clock
        self.clock += 1
        return filled

    def _run(self, slot: Slot, heard: list[Heard]) -> None:
        if slot.stage == ENTER:
            leaves = slot.wanted == 1
            if leaves:
                heard.append(slot.choose())
            stays = self._waits or not leaves
            slot.pending = slot.pending + 1 if stays else 0
            if slot.stage != IDLE:
                full = stays and slot.pending >= self._stack
                slot.stage = (FLUSH if full else ENTER) if leaves else DEEP
            return
        if slot.stage == DEEP:
            heard.append(slot.choose())
        slot.pending = 0
        if slot.stage != IDLE:
            slot.stage = ENTER
