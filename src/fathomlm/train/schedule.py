"""Learning-rate schedules as pure functions of the step, so that a resumed run needs nothing but its step number.

The trapezoid (thesis 4, appendix "Trapezoid learning-rate schedule with checkpoint reuse") rises for w steps, stays flat
to p, and falls to zero over d steps. Its flat part does not depend on the budget, so a checkpoint from it can be cooled
down for any smaller budget: give the warm-up in steps, 5 % of the smallest budget's, and the cool-down as a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fathomlm.errors import OptionError
from fathomlm.train.recipe import ScheduleRecipe


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate of each step of a run, as a part of the highest."""

    kind: str
    total: int
    warmup: int
    cooldown: int
    floor: float

    @classmethod
    def of(cls, recipe: ScheduleRecipe, total: int) -> LearningRate:
        warmup = _steps("schedule.warmup", recipe.warmup, total)
        cooldown = _steps("schedule.cooldown", recipe.cooldown, total) if recipe.kind == "trapezoid" else 0
        if not 0 <= recipe.floor <= 1:
            raise OptionError(f"schedule.floor is a part of the highest rate, from 0 to 1, got {recipe.floor}")
        if warmup + cooldown > total:
            raise OptionError(f"a warm-up of {warmup} and a cool-down of {cooldown} steps do not fit into {total}")
        return cls(recipe.kind, total, warmup, cooldown, recipe.floor)

    @property
    def plateau_end(self) -> int:
        """The first step of the cool-down."""
        return self.total - self.cooldown

    def at(self, step: int) -> float:
        """The part of the highest rate that step `step` (from 0) learns with."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "trapezoid":
            if step < self.plateau_end:
                return 1.0
            return self._fall(1 - (step - self.plateau_end) / self.cooldown)
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        return self._fall(1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def _fall(self, part: float) -> float:
        return self.floor + (1 - self.floor) * max(0.0, part)


def _steps(name: str, value: float, total: int) -> int:
    if value < 0:
        raise OptionError(f"{name} must not be negative, got {value}")
    return round(value) if value >= 1 else round(value * total)
