"""How many steps a run takes, from a budget in tokens, steps, epochs or FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.train.encoder_cost import EncoderCost, over_both
from fathomlm.train.recipe import Recipe, parse_amount


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
        if batch.sequences < 1:
            raise OptionError(f"batch.sequences must be >= 1, got {batch.sequences}")
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


def forward_flops_per_token(
    recipe: Recipe,
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    encoder: Mapping[str, Any] | None = None,
) -> int:
    """As the thesis counts, for each token of a row. With an encoder (its record) a row is a source and a target: what
    the encoder does for the one and the decoder for the other is spread over both."""
    if encoder is None:
        return count(architecture, plan, relaxation=relaxation, context=row_length(recipe)).forward_flops_per_token
    S, T = recipe.data.source_length, recipe.data.target_length
    decoder = count(architecture, plan, relaxation=relaxation, context=T, source=S).forward_flops_per_token
    return over_both(recipe.data, decoder, EncoderCost.of(encoder).forward_flops(S))


def plan_steps(
    recipe: Recipe,
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    rows_in_epoch: int | None,
    encoder: Mapping[str, Any] | None = None,
) -> RunLength:
    """The run's length. `rows_in_epoch` is None where no data is at hand (a dry run)."""
    rows = rows_per_step(recipe)
    tokens = rows * row_length(recipe)
    budget = recipe.budget
    if budget.steps is not None:
        steps = round(parse_amount("budget.steps", budget.steps))
    elif budget.tokens is not None:
        steps = round(parse_amount("budget.tokens", budget.tokens) / tokens)
    elif budget.flops is not None:
        per_token = forward_flops_per_token(recipe, architecture, plan, relaxation, encoder)
        steps = round(parse_amount("budget.flops", budget.flops) / (per_token * tokens))
    else:
        assert budget.epochs is not None
        if rows_in_epoch is None:
            raise OptionError("a budget in epochs needs the prepared data; prepare it first, or give tokens or steps")
        steps = math.ceil(parse_amount("budget.epochs", budget.epochs) * rows_in_epoch / rows)
    if steps < 1:
        raise OptionError(f"the budget is less than one step of {tokens:,} tokens")
    return RunLength(steps=steps, rows_per_step=rows, tokens_per_step=tokens)
