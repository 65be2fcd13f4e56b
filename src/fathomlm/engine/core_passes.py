"""How many passes of the block a routed model's decode steps have, by how deep its tokens go (thesis 4.4.3).

A pass with fewer tokens than rows reads the same weights. Routers are trained for a mean depth, and what they decide on a
user's text may differ from it: the bundled model's tokens run 1.7 recursions where its capacities add up to 2. So the steps
follow what is measured. Steps have whole passes; their mean over several is what tokens need.
"""

from __future__ import annotations

import math

MOST_TURNS = 4
PRIOR, WINDOW = 1024, 16384
"""Tokens that the trained depth counts for, and how many the measured one is taken over."""
PARTS = 8
"""Depths are told apart by an eighth: a little noise shall not change steps that are right."""


def passes_for(depth: float) -> tuple[int, ...]:
    """Passes of the block in front of each turn, so that rows find as many as tokens of this mean depth need."""
    turns = min(range(1, MOST_TURNS + 1), key=lambda many: (abs(round(depth * many) / many - depth), many))
    return spread(max(turns, round(depth * turns)), turns)


def spread(passes: int, turns: int) -> tuple[int, ...]:
    """So many passes in front of so many turns, as evenly as they divide."""
    return tuple(passes * (turn + 1) // turns - passes * turn // turns for turn in range(turns))


class CorePasses:
    def __init__(self, trained: float, turns: int, recursions: int) -> None:
        """`trained` is the mean depth that routers are trained for, `turns` those of a decode step."""
        self._turns, self._recursions = turns, recursions
        self._tokens, self._depths = float(PRIOR), PRIOR * trained
        self._due = 0.0
        """Passes that steps so far should have had more than they did."""
        self.steps = self.passes = 0
        """What was asked for so far: decode steps, and passes in them."""

    @property
    def wanted(self) -> float:
        """Passes of a decode step, on average."""
        depth = round(PARTS * self._depths / self._tokens) / PARTS
        return min(max(depth, 1.0), self._recursions) * self._turns

    @property
    def reachable(self) -> range:
        """All numbers of passes that a decode step may come to have."""
        return range(self._turns, self._turns * self._recursions + 1)

    def learn(self, tokens: int, depths: int) -> None:
        """So many tokens ran so many recursions in all."""
        self._tokens, self._depths = self._tokens + tokens, self._depths + depths
        if self._tokens > WINDOW:
            self._tokens, self._depths = WINDOW, self._depths * WINDOW / self._tokens

    def next(self, steps: int = 1) -> int:
        """The passes of the next decode step, or of each of the next ones, where those are one piece of work."""
        wanted = self.wanted
        passes = min(max(round(wanted + self._due / steps), math.floor(wanted)), math.ceil(wanted))
        self._due += steps * (wanted - passes)
        self.steps, self.passes = self.steps + steps, self.passes + steps * passes
        return passes
