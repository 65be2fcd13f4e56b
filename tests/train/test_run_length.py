"""Budgets: the same run in steps, tokens, epochs and FLOPs."""

from __future__ import annotations

import dataclasses

import pytest

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.options import check
from fathomlm.sizes import parse_amount
from fathomlm.train.flops import forward_flops_per_token
from fathomlm.train.recipe import BatchRecipe, BudgetRecipe, DataRecipe, Recipe
from fathomlm.train.schedule import micro_batch_size, plan_steps, row_length, rows_per_step
from fathomlm.train.student import StudentSpec

ARCHITECTURE = Architecture(family="llama", layers=4, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=257)
PLAN = DepthPlan.vanilla(4)


def steps(rows_in_epoch=100, *, batch=None, data=None, **budget):
    recipe = Recipe(
        budget=BudgetRecipe(**budget),
        batch=BatchRecipe(**(batch or {"sequences": 8})),
        data=DataRecipe(**(data or {"context": 64})),
    )
    spec = StudentSpec(architecture=ARCHITECTURE, plan=PLAN, relaxation=None)
    return plan_steps(recipe, forward_flops_per_token(recipe, spec), rows_in_epoch)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        ({"steps": 25}, 25),
        ({"steps": "1k"}, 1000),
        ({"tokens": 25 * 8 * 64}, 25),
        ({"tokens": 25 * 8 * 64 + 200}, 25),
        ({"tokens": "1M"}, 1953),
        ({"epochs": 2}, 25),
        ({"epochs": 0.5}, 7),
    ],
)
def test_steps_of_a_budget(budget, wanted):
    found = steps(**budget)
    assert (found.steps, found.rows_per_step, found.tokens_per_step) == (wanted, 8, 512)
    assert found.tokens == wanted * 512


def test_a_budget_in_flops_is_counted_as_the_cost_table_counts():
    cost = count(ARCHITECTURE, PLAN, context=64).forward_flops_per_token
    assert steps(flops=cost * 512 * 30).steps == 30
    assert steps(flops=f"{cost * 512 * 30 / 1e6}M").steps == 30


def test_a_batch_in_tokens():
    assert steps(steps=1, batch={"tokens": "4k"}, data={"context": 100}).rows_per_step == 40
    assert steps(steps=1, batch={"tokens": 4096}, data={"context": 64}).rows_per_step == 64
    with pytest.raises(OptionError, match=r"batch\.tokens must be a multiple of the row length 64, got 100"):
        steps(steps=1, batch={"tokens": 100})
    with pytest.raises(OptionError, match=r"batch\.sequences must be >= 1, got 0"):
        check(Recipe(batch=BatchRecipe(sequences=0)))


def test_pairs_are_counted_at_their_longest():
    recipe = Recipe(data=DataRecipe(pairs=["a", "b"], source_length=30, target_length=10), batch=BatchRecipe(tokens=400))
    assert row_length(recipe) == 40
    assert rows_per_step(recipe) == 10
    assert row_length(dataclasses.replace(recipe, data=DataRecipe(context=7))) == 7


def test_budgets_that_make_no_run():
    with pytest.raises(OptionError, match="a budget in epochs requires the prepared data"):
        steps(None, epochs=1)
    with pytest.raises(OptionError, match="less than one step of 512 tokens"):
        steps(tokens=100)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (500, 500),
        ("500", 500),
        ("15B", 15e9),
        ("2M", 2e6),
        ("2m", 2e6),
        ("1.5k", 1500),
        ("2e6", 2e6),
        ("1T", 1e12),
        ("1_000", 1000),
        ("1,000", 1000),
        (2e18, 2e18),
    ],
)
def test_amounts(text, number):
    assert parse_amount("x", text) == number


@pytest.mark.parametrize("text", ["", "B", "ten", "1KB", "2 6", "--3"])
def test_amounts_that_are_none(text):
    with pytest.raises(OptionError, match=r"cannot read budget\.tokens"):
        parse_amount("budget.tokens", text)


@pytest.mark.parametrize("value", [0, -1, "-2M", float("nan"), float("inf"), "nan"])
def test_amounts_are_above_zero(value):
    with pytest.raises(OptionError, match=r"budget\.tokens must be > 0"):
        parse_amount("budget.tokens", value)


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "taken"), [(64, 2, 8, 8), (7, 1, 5, 1), (12, 2, 4, 3), (4, 1, 100, 4), (6, 3, 1, 1)]
)
def test_micro_batches_all_have_one_shape(rows, ranks, micro, taken):
    assert micro_batch_size(rows, ranks, micro) == taken
    assert rows % (ranks * taken) == 0


def test_a_batch_that_does_not_divide_among_ranks_is_refused():
    with pytest.raises(OptionError, match="7 rows does not divide among 2 ranks"):
        micro_batch_size(7, 2, 4)
