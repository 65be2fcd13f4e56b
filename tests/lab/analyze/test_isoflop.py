"""Tokens under a budget, against the thesis' printed tables."""

from __future__ import annotations

import pytest

from fathomlm.depth.presets import PRESETS
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.options import Plan
from fathomlm.lab.analyze.plans import iso_rows, iso_table
from fathomlm.lab.common import amount

# tab_mor:scaling_laws: layers, parameters without embeddings in millions, billions of tokens at 2e18, 5e18 and 16.5e18.
PRINTED = {
    "smollm-135m": {
        "vanilla": ("30", 106, (6.5, 16.1, 53.3)),
        "recursive": ("1+10+1", 42, (6.1, 15.1, 50.0)),
        "mor": ("1+10+1", 42, (9.2, 23.1, 76.2)),
    },
    "smollm-360m": {
        "vanilla": ("32", 315, (2.4, 6.0, 19.8)),
        "recursive": ("1+10+1", 118, (2.4, 6.0, 19.8)),
        "mor": ("1+10+1", 118, (3.6, 9.0, 29.7)),
    },
    "smollm-730m": {
        "vanilla": ("26", 654, (1.2, 3.1, 10.1)),
        "recursive": ("1+8+1", 252, (1.2, 3.1, 10.1)),
        "mor": ("1+8+1", 252, (1.8, 4.5, 14.9)),
    },
    "smollm-1.7b": {
        "vanilla": ("24", 1610, (0.6, 1.5, 4.8)),
        "recursive": ("1+8+1", 670, (0.5, 1.3, 4.5)),
        "mor": ("1+8+1", 670, (0.8, 2.0, 6.5)),
    },
}
BUDGETS = (2e18, 5e18, 16.5e18)
BASES = {name: PRESETS[name].architecture for name in PRINTED}


@pytest.mark.parametrize("wide", [False, True])
def test_tokens_against_the_vanilla_row_within_two_percent(wide):
    rows = iso_rows(BASES, (16.5e18,), Plan(wide_kv=wide))
    assert len(rows) == 12
    for row in rows:
        vanilla = PRINTED[row.base]["vanilla"][2][-1]
        layout, _, tokens = PRINTED[row.base][row.kind]
        assert row.layout == layout
        assert row.relative_tokens == pytest.approx(tokens[-1] / vanilla, rel=0.02), (row.base, row.kind)


def test_printed_tokens_to_the_last_digit_where_k_and_v_are_counted_wide():
    for row in iso_rows(BASES, BUDGETS, Plan(wide_kv=True)):
        _, millions, tokens = PRINTED[row.base][row.kind]
        assert round(row.tokens / 1e9, 1) == tokens[BUDGETS.index(row.budget)], (row.base, row.kind, row.budget)
        assert row.non_embedding_parameters / 1e6 == pytest.approx(millions, rel=0.02)  # with their true widths


# tab_mor:main_results at 16.5 EFLOPs and 20B tokens: EFLOPs for as many tokens as the vanilla model has.
@pytest.mark.parametrize(("recursions", "eflops", "tokens"), [(2, 12.3, 27), (3, 11.0, 30), (4, 11.0, 30)])
def test_flops_at_equal_tokens_within_two_percent(recursions, eflops, tokens):
    bases = {"smollm-360m": BASES["smollm-360m"]}
    *_, mor = iso_rows(bases, (16.5e18,), Plan(recursions=(recursions,)))
    assert mor.flops_at_equal_tokens / 1e18 == pytest.approx(eflops, rel=0.02)
    assert mor.relative_tokens * 20 == pytest.approx(tokens, rel=0.02)


def test_what_a_budget_buys_costs_the_budget():
    for row in iso_rows(BASES, (1e18,), Plan(recursions=(2, 3), kv="share", context=512)):
        assert row.tokens * row.flops_per_token == pytest.approx(row.budget)
        assert row.flops_at_equal_tokens * row.relative_tokens == pytest.approx(row.budget)


def test_a_strategy_that_does_not_loop_has_no_routed_row():
    rows = iso_rows({"smollm-135m": BASES["smollm-135m"]}, (1e18,), Plan(sharing="sequence"))
    assert [row.kind for row in rows] == ["vanilla", "recursive"]


def test_options_out_of_range():
    with pytest.raises(OptionError, match=">= 2, got 1"):
        iso_rows(BASES, (1e18,), Plan(recursions=(1, 2)))
    with pytest.raises(OptionError, match="must be > 0"):
        iso_rows(BASES, (0.0,), Plan())


def test_the_table_is_short():
    header, first, *_ = iso_table(iso_rows(BASES, (16.5e18,), Plan(wide_kv=True)))
    assert header == ["base", "model", "layers", "params", "EFLOPs", "tokens", "ratio", "equal"]
    assert first == ["smollm-135m", "vanilla", "30", "106M", "16.5", "53.3B", "1.000", "16.5"]
    assert [amount(value) for value in (7, 1234, 42_481_728, 5.33e10)] == ["7", "1.23K", "42.5M", "53.3B"]
