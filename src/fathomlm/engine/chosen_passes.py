"""One sequence with one exit: the host chooses each pass when the one before has told what comes next.

A captured decode step runs all of its passes, also those that nobody needs. With one sequence it is quicker to ask, if that
takes less time than a pass that was not needed: so between what a pass tells and the start of the next one the host does
nothing else. What passes have chosen is taken in later, some of them at a time, while one that was started ahead runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.engine.programs.base import BAD, ENDED, FLAGS, NEXT, SLOT, VALID, WAITING
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.runner import Runner
from fathomlm.engine.sizing import Sizes

TOGETHER = 2
"""The most passes that are started together: a deep one, and the shallow one behind it."""
TRIES = 2
"""Passes of either kind that nobody runs, before it is clear that the sequence waits for the host."""


class ChosenPasses:
    def __init__(self, sizes: Sizes, program: ExitProgram) -> None:
        self._program = program
        self._most = (sizes.lag + 2) * sizes.burst
        """Passes that there is room for: for their results, and for the entries that they make."""
        self._next = (0, 1)
        self._shallow = True
        """Whether the last pass that was started is a shallow one, whose only row tells all."""
        self.under_way: list[int] = []
        """Passes that were started, and whose results nobody has looked at."""
        self.epoch = -1
        """The placement that they are of."""

    def begin(self) -> None:
        """A sequence was placed: its first pass is a shallow one."""
        self._next = (0, 1)

    def give_up(self) -> list[int]:
        """The numbers of passes under way, for whoever collects them."""
        numbers, self.under_way = self.under_way, []
        return numbers

    def run(self, runner: Runner, epoch: int, left: int) -> list[int]:
        """Some passes of the sequence that is placed with this epoch and lacks `left` tokens; their numbers. Others may be
        under way afterwards."""
        numbers, idle, group = list[int](), 0, self.give_up() or self._start(runner, left)
        self.epoch = epoch
        while True:
            numbers += group
            flags = runner.outcome(group[-1]) if self._shallow else None
            later = group[:-1] if flags is not None and left > self._program.stack + 1 else []
            told = [] if later else _told(runner, group if flags is None else group[:-1])
            told += [] if flags is None else [flags]
            if told:
                self._next = told[-1] >> NEXT & (1 << WAITING - NEXT) - 1, told[-1] >> WAITING
            idle = 0 if told else idle + 1
            over = any(flags & (ENDED | BAD) for flags in told)
            if over or idle == TRIES or len(numbers) + TOGETHER > self._most:
                return numbers
            left -= _chosen(told)
            group = self._start(runner, left)
            left -= _chosen(_told(runner, later))  # far from the end it does not matter when
            if len(numbers) + len(group) + TOGETHER > self._most:
                self.under_way = group
                return numbers

    def _start(self, runner: Runner, left: int) -> list[int]:
        """The next pass. What follows a deep one is known: a shallow pass is started with it, unless the sequence is over
        then; if it ends with an end token, that pass has nothing to do. Where nobody runs a pass, the other kind is tried
        next."""
        segment, _ = self._next
        program, launch = self._program, runner.launch
        group = [launch(only=program.pass_for(*self._next))]
        if segment and left > 1:
            group.append(launch(only=program.pass_for(0, 1)))
        self._next, self._shallow = (1 - segment, program.stack), segment == 0 or len(group) > 1
        return group


def _told(runner: Runner, group: Sequence[int]) -> list[int]:
    """The flags of all rows that ran some passes; those of the last one say what comes next."""
    told: list[int] = []
    for output in runner.collect(group) if group else ():
        ints_NC = output.ints_NC.numpy()
        told += ints_NC[ints_NC[:, SLOT] != runner.state.spare, FLAGS].tolist()
    return told


def _chosen(told: Sequence[int]) -> int:
    """How many tokens were chosen."""
    return sum(flags & VALID for flags in told)
