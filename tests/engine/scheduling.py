"""Short words for what the front and the device do to a scheduler."""

from __future__ import annotations

from typing import Any

from fathomlm.engine.orders import Plan
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence


def build(**changes: Any) -> Scheduler:
    sizes = {"page_size": 2, "slots": 4, "max_queue": 8, "chunk": 100, "lookahead": 1, "max_length": 100}
    return Scheduler(**{"tables": (0,), "pool_pages": (50,)} | sizes | changes)


def submit(scheduler: Scheduler, id: int, prompt: int | tuple[int, ...], new: int = 4) -> Sequence:
    """A prompt of this many tokens that no other sequence has, or just this one."""
    sequence = Sequence(id, tuple(id * 1000 + at for at in range(prompt)) if isinstance(prompt, int) else prompt, new)
    scheduler.submit(sequence)
    return sequence


def read_all(scheduler: Scheduler, plan: Plan, deep: tuple[int, ...] = ()) -> None:
    """The device reports every chunk of a plan; `deep` are the entries of deeper tables."""
    by_slot = {sequence.slot: sequence for sequence in scheduler.placed}
    for chunk in plan.chunks:
        upto = chunk.first + chunk.count
        assert scheduler.read(by_slot[chunk.slot].id, chunk.epoch, upto, (upto, *deep))


def run(scheduler: Scheduler, sequence: Sequence, count: int = 1) -> None:
    """The device reports so many new tokens of a plain sequence."""
    tokens = [sequence.id * 1000 + 500 + len(sequence.tokens) + at for at in range(count)]
    assert scheduler.note(sequence.id, sequence.epoch, tokens, (sequence.entries[0] + count,))


def placed(plan: Plan) -> list[int]:
    return [placement.sequence.id for placement in plan.placements]


def rooms(plan: Plan) -> dict[tuple[int, int], int]:
    return {(room.slot, room.table): room.entries for room in plan.rooms}


def ids(sequences: tuple[Sequence, ...]) -> list[int]:
    return [sequence.id for sequence in sequences]
