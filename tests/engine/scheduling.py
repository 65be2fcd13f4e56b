"""Short words for what the front and the device do to a scheduler."""

from __future__ import annotations

from typing import Any

from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Request
from fathomlm.engine.schedule import SchedulerOutput
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence


def build(**changes: Any) -> Scheduler:
    sizes = {"page_size": 2, "max_sequences": 4, "max_queue": 8, "prefill_chunk": 100, "lookahead": 1, "max_length": 100}
    return Scheduler(**{"tables": (0,), "pool_pages": (50,)} | sizes | changes)


def submit(scheduler: Scheduler, id: int, prompt: int | tuple[int, ...], new: int = 4) -> Sequence:
    """A prompt of this many tokens that no other sequence has, or just this one."""
    tokens = tuple(id * 1000 + at for at in range(prompt)) if isinstance(prompt, int) else prompt
    sequence = Sequence(Request(id=id, prompt=tokens, sampling=Sampling(max_new_tokens=new)))
    scheduler.submit(sequence)
    return sequence


def read_all(scheduler: Scheduler, plan: SchedulerOutput, deep: tuple[int, ...] = ()) -> None:
    """The device reports every chunk of a plan; `deep` are the entries of deeper tables."""
    by_slot = {sequence.slot: sequence for sequence in scheduler.placed}
    for chunk in plan.chunks:
        upto = chunk.first + chunk.count
        assert scheduler.confirm_prefill(by_slot[chunk.slot].id, chunk.epoch, upto, (upto, *deep))


def run(scheduler: Scheduler, sequence: Sequence, count: int = 1) -> None:
    """The device reports so many new tokens of a plain sequence."""
    tokens = [sequence.id * 1000 + 500 + len(sequence.tokens) + at for at in range(count)]
    assert scheduler.note(sequence.id, sequence.epoch, tokens, (sequence.entries[0] + count,))


def placed(plan: SchedulerOutput) -> list[int]:
    return [placement.sequence.id for placement in plan.placements]


def granted(plan: SchedulerOutput, sequence: Sequence) -> list[tuple[int, int, int]]:
    """Table, number and page of each page that a sequence gets."""
    return [
        (grant.table, grant.first + number, page)
        for grant in plan.grants
        if grant.slot == sequence.slot
        for number, page in enumerate(grant.pages)
    ]


def rooms(plan: SchedulerOutput) -> dict[tuple[int, int], int]:
    return plan.capacity


def ids(sequences: tuple[Sequence, ...]) -> list[int]:
    return [sequence.id for sequence in sequences]
