"""What the device's three programs do to a batch, without tensors: who runs in which pass, and when a token is chosen.

Each is the twin of a program of `engine.programs`, which says why things are as they are. Here a token's depth is known
beforehand, from its trajectory. Tests hold them against the engine decode step by decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fathomlm.engine.schedule import PrefillChunk, SchedulerOutput
from fathomlm.kernels.routed_rows import CORE, ENTER, IDLE
from fathomlm.lab.simulate.costs import PassFill
from fathomlm.lab.simulate.trajectories import Trajectory

DEEP, FLUSH = 1, 2
LONG_AGO = -(10**12)


@dataclass(slots=True)
class SimulatedSequence:
    """One sequence on the device."""

    number: int
    id: int
    epoch: int
    trajectory: Trajectory
    made: int
    position: int
    stage: int
    since: int
    entries: list[int]
    capacity: list[int]
    depth: int = 0
    """loop: how deep its current token has come."""
    pending: int = 0
    """exits: tokens that wait to run behind the exit."""

    @property
    def wanted(self) -> int:
        """How deep its current token goes."""
        return self.trajectory.depths[self.made]

    def choose(self) -> ChosenToken:
        """Its current token is through: the next one takes its place, or the sequence is over."""
        chosen = ChosenToken(self.id, self.epoch, self.wanted, len(self.trajectory.depths) == self.made + 1)
        self.made += 1
        self.position += 1
        if chosen.ended:
            self.stage = IDLE
        return chosen


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token that was chosen."""

    id: int
    epoch: int
    depth: int
    ended: bool


@dataclass(slots=True)
class SimulatedStep:
    passes: list[PassFill] = field(default_factory=list)
    chosen: list[ChosenToken] = field(default_factory=list)


class Device:
    """What all devices do alike: carry out what was scheduled, and prefill. Each has a decode step of its own."""

    def __init__(self, tables: int, batch_size: int) -> None:
        self.batch_size, self._tables = batch_size, tables
        self.sequences: dict[int, SimulatedSequence] = {}
        self.clock = 0
        self._arrivals = 0

    def apply(self, scheduled: SchedulerOutput, trajectories: Mapping[int, Trajectory]) -> None:
        """Everything that was scheduled but its prefill chunks."""
        for number in scheduled.stops:
            self.sequences.pop(number, None)
        for placement in scheduled.placements:
            sequence = placement.sequence
            self.sequences[placement.slot] = SimulatedSequence(
                number=placement.slot,
                id=sequence.id,
                epoch=placement.epoch,
                trajectory=trajectories[sequence.id],
                made=len(sequence.tokens),
                position=sequence.length - 1,
                stage=ENTER if placement.ready else IDLE,
                since=LONG_AGO + self._arrivals,
                entries=list(placement.entries),
                capacity=[0] * self._tables,
            )
            self._arrivals += 1
        for (number, table), entries in scheduled.capacity.items():
            self.sequences[number].capacity[table] = entries

    def prefill(self, chunk: PrefillChunk) -> list[int]:
        """Entries by table once a chunk is read."""
        sequence = self.sequences[chunk.slot]
        self._prefill(sequence, chunk)
        if chunk.last:
            sequence.stage = ENTER
        return list(sequence.entries)

    def decode_step(self) -> SimulatedStep:
        raise NotImplementedError

    def _prefill(self, sequence: SimulatedSequence, chunk: PrefillChunk) -> None:
        sequence.entries = [chunk.first + chunk.count]

    def entries(self, before: Sequence[int], length: int, depth: int) -> list[int]:
        """By table, with the token that was chosen last; `length` counts the new one, which has not run."""
        return [length]

    def _oldest(self, waiting: list[SimulatedSequence]) -> list[SimulatedSequence]:
        """Those that have waited longest, in that order."""
        waiting.sort(key=lambda sequence: (sequence.since, sequence.number))
        return waiting[: self.batch_size]


class PlainDevice(Device):
    """Every token runs everything, in a pass of its own sequence's row (`programs.whole`); where there are more sequences
    than rows, those that came first run."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(1, batch_size)

    def decode_step(self) -> SimulatedStep:
        ready = [one for one in self.sequences.values() if one.stage == ENTER and one.entries[0] < one.capacity[0]]
        chosen = []
        for sequence in self._oldest(ready) if len(ready) > self.batch_size else ready:
            sequence.entries[0] += 1
            chosen.append(sequence.choose())
        return SimulatedStep([("step", len(chosen))], chosen)


class LoopDevice(Device):
    """Tokens run one block as often as they are deep, rows of all depths together (`programs.routed`).

    With `own` entries each recursion has a table, `recursion_tables[r]`, where only the tokens that ran it have an entry;
    `outer` says that there is a table before those, for layers that every token runs. Otherwise there is one table.
    """

    def __init__(
        self,
        batch_size: int,
        cores: Sequence[int] = (1,),
        *,
        recursions: int,
        own: bool = False,
        outer: bool = False,
        at_once: bool = False,
    ) -> None:
        """`cores` are the passes of the block before each turn of a decode step. `at_once`: a sequence that is placed
        stands before the block, where the engine brings it there with the next turn; so it is where blocks alone take
        time."""
        super().__init__(recursions + outer if own else 1, batch_size)
        self.cores = tuple(cores)
        self._own, self._outer = own, own and outer
        self._first = 1 if self._outer else 0
        """The table of the first recursion."""
        self.recursions, self._turn = recursions, CORE + recursions
        self._at_once = at_once

    def decode_step(self) -> SimulatedStep:
        step = SimulatedStep()
        if self._at_once:
            for sequence in self.sequences.values():
                if sequence.stage == ENTER and self._rank(sequence, 0) < sequence.capacity[0]:
                    sequence.stage = CORE
        for passes in self.cores:
            for _ in range(passes):
                step.passes.append(("core", self._core()))
            step.passes.append(("turn", self._turn_over(step.chosen)))
        return step

    def entries(self, before: Sequence[int], length: int, depth: int) -> list[int]:
        if not self._own:
            return [length]
        return [
            count + (table < self._first or table - self._first < depth) for table, count in enumerate(before)
        ]  # every token has an entry in the outer table

    def _prefill(self, sequence: SimulatedSequence, chunk: PrefillChunk) -> None:
        if not self._own:
            super()._prefill(sequence, chunk)
            return
        depths = sequence.trajectory.depths
        for at in range(chunk.first, chunk.first + chunk.count):
            # How deep a prompt's tokens go is not in a trajectory: they go as deep as the completion's own, one after the
            # other.
            sequence.entries = self.entries(sequence.entries, 0, depths[at % len(depths)])

    def _rank(self, sequence: SimulatedSequence, table: int) -> int:
        return sequence.entries[table] if self._own else sequence.position

    def _core(self) -> int:
        waiting = []
        for sequence in self.sequences.values():
            if CORE <= sequence.stage < self._turn:
                table = self._first + sequence.stage - CORE if self._own else 0
                if self._rank(sequence, table) < sequence.capacity[table]:
                    waiting.append(sequence)
        chosen = self._oldest(waiting)
        for sequence in chosen:
            sequence.depth = sequence.stage - CORE + 1
            if self._own:
                sequence.entries[self._first + sequence.depth - 1] += 1
            sequence.stage = CORE + sequence.depth if sequence.depth < sequence.wanted else self._turn
            sequence.since = self.clock
        self.clock += 1
        return len(chosen)

    def _turn_over(self, chosen: list[ChosenToken]) -> int:
        waiting = [
            sequence
            for sequence in self.sequences.values()
            if sequence.stage == self._turn or (sequence.stage == ENTER and self._rank(sequence, 0) < sequence.capacity[0])
        ]
        running = self._oldest(waiting)
        for sequence in running:
            if sequence.stage == self._turn:
                if self._outer:
                    sequence.entries[0] += 1
                chosen.append(sequence.choose())
            if sequence.stage == IDLE:
                continue
            enters = self._rank(sequence, 0) < sequence.capacity[0]
            sequence.stage = CORE if enters else ENTER
            if enters:
                sequence.since = self.clock
        self.clock += 1
        return len(running)


class ExitDevice(Device):
    """Tokens exit after a first part or run on, and those that exited run on later with others (`programs.exits`)."""

    def __init__(self, batch_size: int, *, mixed: bool, stack: int = 16, waits: bool = True, shallows: int = 1) -> None:
        """`mixed`: one block twice, so that rows of both parts share a pass. `waits`: what left has to run on, for its exact
        entries; at most `stack` tokens of a sequence wait."""
        super().__init__(1, batch_size)
        self.kinds = ("both",) if mixed else (*["shallow"] * shallows, "deep")
        self._waits = waits
        self._stack = min(stack, batch_size) if waits else 1

    def decode_step(self) -> SimulatedStep:
        step = SimulatedStep()
        for kind in self.kinds:
            step.passes.append((kind, self._pass(kind, step.chosen)))
        return step

    def _pass(self, kind: str, chosen: list[ChosenToken]) -> int:
        waiting = []
        for sequence in self.sequences.values():
            if sequence.stage in (DEEP, FLUSH):
                if kind != "shallow":
                    waiting.append(sequence)
            elif sequence.stage == ENTER and kind != "deep" and sequence.position < sequence.capacity[0]:
                waiting.append(sequence)
        waiting.sort(key=lambda sequence: (sequence.since, sequence.number))
        filled = 0
        for sequence in waiting:
            size = sequence.pending if sequence.stage in (DEEP, FLUSH) else 1
            if filled + size > self.batch_size:
                break
            filled += size
            self._run(sequence, chosen)
            sequence.since = self.clock
        self.clock += 1
        return filled

    def _run(self, sequence: SimulatedSequence, chosen: list[ChosenToken]) -> None:
        if sequence.stage == ENTER:
            exits_early = sequence.wanted == 1
            if exits_early:
                chosen.append(sequence.choose())
            stays = self._waits or not exits_early
            sequence.pending = sequence.pending + 1 if stays else 0
            if sequence.stage != IDLE:
                full = stays and sequence.pending >= self._stack
                sequence.stage = (FLUSH if full else ENTER) if exits_early else DEEP
            return
        if sequence.stage == DEEP:
            chosen.append(sequence.choose())
        sequence.pending = 0
        if sequence.stage != IDLE:
            sequence.stage = ENTER
