"""How long a run is, in rows and steps, and the learning rate of each step: pure functions of the recipe and a step, so that
a resumed run needs nothing but its step number.

The trapezoid (thesis 4, appendix "Trapezoid learning-rate schedule with checkpoint reuse") rises for w steps, stays flat
to p, and falls to zero over d steps. Its flat part does not depend on the budget, so a checkpoint from it can be cooled
down for any smaller budget: give the warm-up in steps, 5 % of the smallest budget's, and the cool-down as a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fathomlm.errors import OptionError
from fathomlm.sizes import parse_amount
from fathomlm.train.recipe import Recipe, ScheduleRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The run's length: it depends on the recipe and the data, never on how many ranks there are."""

    steps: int
    rows_per_step: int
    tokens_per_step: int

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step


def rows_per_step(recipe: Recipe) -> int:
    """Rows in the global batch."""
    batch, context = recipe.batch, row_length(recipe)
    if batch.sequences is not None:
        return batch.sequences
    assert batch.tokens is not None
    tokens = round(parse_amount("batch.tokens", batch.tokens))
    rows = round(tokens / context)
    if rows < 1 or (tokens % context and abs(rows * context - tokens) > 0.05 * tokens):
        raise OptionError(f"batch.tokens must be a multiple of the row length {context}, got {tokens:,}")
    return rows


def micro_batch_size(rows: int, ranks: int, micro: int) -> int:
    """The largest micro-batch up to `micro` that divides a rank's rows, so that all have one shape."""
    if rows % ranks:
        raise OptionError(f"the batch of {rows} rows does not divide among {ranks} ranks")
    own = rows // ranks
    return next(size for size in range(min(micro, own), 0, -1) if own % size == 0)


def row_length(recipe: Recipe) -> int:
    """Tokens in a row; pairs are counted at their longest."""
    data = recipe.data
    return data.source_length + data.target_length if data.pairs else data.context


def plan_steps(recipe: Recipe, forward_flops_per_token: int, rows_in_epoch: int | None) -> RunLength:
    """The run's length. A budget in FLOPs is of `forward_flops_per_token`, as the thesis counts; `rows_in_epoch` is None
    where no data is at hand (a dry run)."""
    rows = rows_per_step(recipe)
    tokens = rows * row_length(recipe)
    budget = recipe.budget
    if budget.steps is not None:
        steps = round(parse_amount("budget.steps", budget.steps))
    elif budget.tokens is not None:
        steps = round(parse_amount("budget.tokens", budget.tokens) / tokens)
    elif budget.flops is not None:
        steps = round(parse_amount("budget.flops", budget.flops) / (forward_flops_per_token * tokens))
    else:
        assert budget.epochs is not None
        if rows_in_epoch is None:
            raise OptionError("a budget in epochs requires the prepared data; prepare it first, or give tokens or steps")
        steps = math.ceil(parse_amount("budget.epochs", budget.epochs) * rows_in_epoch / rows)
    if steps < 1:
        raise OptionError(f"the budget is less than one step of {tokens:,} tokens")
    return RunLength(steps=steps, rows_per_step=rows, tokens_per_step=tokens)


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
        warmup = _steps(recipe.warmup, total)
        cooldown = _steps(recipe.cooldown, total) if recipe.kind == "trapezoid" else 0
        if warmup + cooldown > total:
            cooling = f" and a cool-down of {cooldown}" if recipe.kind == "trapezoid" else ""
            lower = "schedule.warmup or schedule.cooldown" if cooling else "schedule.warmup"
            raise OptionError(
                f"a warm-up of {warmup}{cooling} steps does not fit into a run of {total}: lower {lower}, "
                "where 0.1 is a tenth of the run"
            )
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


def _steps(value: float, total: int) -> int:
    return round(value) if value >= 1 else round(value * total)
