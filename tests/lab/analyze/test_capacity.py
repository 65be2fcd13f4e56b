"""What fits a device: the largest batch that does, and not one row more."""

from __future__ import annotations

import pytest

from fathomlm.depth import DepthPlan
from fathomlm.depth.presets import PRESETS
from fathomlm.lab.analyze.options import Plan
from fathomlm.lab.analyze.plans import capacity_rows, capacity_table, train_bytes
from fathomlm.train.memory import PLANNED
from fathomlm.train.student import StudentSpec

BASES = {"smollm-135m": PRESETS["smollm-135m"].architecture}


@pytest.mark.parametrize("memory", [24 * 10**9, 80 * 10**9])
def test_one_row_more_would_not_fit(memory):
    options = Plan(gpu_memory=memory, recursions=(1, 3), ranks=(0,), router=None)
    for row in capacity_rows(BASES, options):
        plan = DepthPlan.build("middle-cycle", row.recursions, 30, "add")
        parts = StudentSpec(architecture=BASES["smollm-135m"], plan=plan, relaxation=None)
        room = PLANNED * memory
        assert train_bytes(parts, row.train_rows, options) == row.train_bytes <= room
        assert train_bytes(parts, row.train_rows + 1, options) > room
        served = row.weight_bytes + row.serve_sequences * row.kv_bytes_per_sequence
        assert served <= room < served + row.kv_bytes_per_sequence


def test_recursions_ranks_and_routers_change_what_fits():
    options = Plan(gpu_memory=24 * 10**9, recursions=(1, 3), ranks=(0, 64))
    plain, looped, relaxed, routed = capacity_rows(BASES, options)
    assert [(row.recursions, row.rank, row.routed) for row in (plain, looped, relaxed, routed)] == [
        (1, 0, False),
        (3, 0, False),
        (3, 64, False),
        (3, 0, True),
    ]
    assert looped.parameters < relaxed.parameters < plain.parameters
    assert relaxed.train_rows < looped.train_rows < routed.train_rows
    assert routed.kv_bytes_per_sequence < looped.kv_bytes_per_sequence
    assert routed.serve_sequences > looped.serve_sequences
    again = capacity_rows(BASES, Plan(gpu_memory=24 * 10**9, recursions=(3,), ranks=(0,), recompute="layer"))
    assert again[0].train_rows > looped.train_rows


def test_a_device_that_is_too_small():
    (row,) = capacity_rows(BASES, Plan(gpu_memory=200 * 10**6, recursions=(1,)))
    assert (row.train_rows, row.serve_sequences) == (0, 0)
    assert row.train_bytes > 200e6
    assert capacity_table([row])[1][4] == "none"
