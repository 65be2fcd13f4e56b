"""How many decode steps the host starts before it reads what they chose.

A burst costs the host something that does not grow with its steps. Small models at large batch sizes finish a burst before
the host has started the next one: the device waits, and longer bursts cost the host less per token. Elsewhere short ones
are better: a sequence that ends leaves its row empty, and a new one waits, until the host hears of it. So bursts follow
what is seen: where the device was found idle several times in a row they are doubled, and after a long time in which it
never was they are halved, to see whether shorter ones are enough.

The prompts of the sequences that take the places of those that ended are read between two bursts, which takes the device as
long for ten of them as for a few. So bursts become longer, too, where requests wait for a place anyway and others fill the
rows of the sequences that end meanwhile (`Launches`).
"""

from __future__ import annotations

BURST = 4
"""Decode steps of a burst on a GPU, at first."""
LONGER = 4
"""The longest bursts, as a multiple of those that an engine begins with."""
LATE = 4
"""Bursts in a row that had ended before the next began, or behind which requests waited."""
PATIENCE, MOST_PATIENCE = 64, 4096
"""Bursts in a row of which neither is true, before shorter ones are tried; doubled each time when those were too short."""
SOON = 4 * LATE
"""Bursts: what is lengthened this soon after it was shortened was too short."""


class BurstLength:
    def __init__(self, least: int, most: int) -> None:
        assert 1 <= least <= most, f"bursts of {least} to {most} decode steps"
        self.least, self.most = least, most
        self.steps = least
        self._patience = PATIENCE
        self._paid, self._alike = False, 0
        self._since_shorter = MOST_PATIENCE

    def observe(self, pays: bool, roomy: bool) -> bool:
        """Whether a longer one would have paid, now that the next burst is due, and whether there is memory to spare: a
        sequence needs room for all the tokens of the bursts that are under way. Returns whether bursts change."""
        before = self.steps
        self._alike = self._alike + 1 if pays == self._paid else 1
        self._paid = pays
        self._since_shorter += 1
        if not roomy:
            self._become(self.least)
        elif pays and self._alike >= LATE:
            if self._since_shorter <= SOON and self.steps < self.most:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._become(min(2 * self.steps, self.most))
        elif not pays and self._alike >= self._patience and self.steps > self.least:
            self._become(max(self.steps // 2, self.least))
            self._since_shorter = 0
        return self.steps != before

    def fix(self) -> None:
        self.most = self.least
        self._become(self.least)

    def _become(self, steps: int) -> None:
        if steps != self.steps:
            self.steps, self._alike = steps, 0
