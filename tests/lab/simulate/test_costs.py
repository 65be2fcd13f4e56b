"""Times by rows: lines between what was measured, tables of users, and the thesis' A100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.simulate.costs import Costs, TimeCurve, from_table, read_costs
from fathomlm.lab.simulate.thesis import (
    all_printed,
    all_times,
    find_times,
    looped_preset,
    plain_of,
    preset_costs,
)


def test_between_two_measurements_time_is_on_the_line() -> None:
    curve = TimeCurve(((2, 10.0), (4, 14.0), (8, 14.0)))
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 6, 8, 9)] == [10.0, 10.0, 12.0, 14.0, 14.0, 14.0, 14.0]
    assert TimeCurve(((1, 1.0), (3, 5.0))).at(5) == 9.0
    assert TimeCurve.flat(3.0).at(100) == 3.0
    both = curve + TimeCurve(((1, 1.0), (3, 3.0)))
    assert [both.at(rows) for rows in (2, 3, 4)] == [12.0, 15.0, 18.0]
    assert curve.times(2.0).at(3) == 24.0


def test_a_pass_costs_its_filled_rows_or_all_of_them() -> None:
    costs = Costs(name="x", passes={"core": TimeCurve(((1, 1.0), (11, 11.0))), "turn": TimeCurve.flat(0.5)})
    passes = [("core", 3), ("core", 0), ("core", 2), ("turn", 1)]
    assert costs.of_decode_step(passes, 10) == {"core": 5.0, "turn": 0.5}
    padded = Costs(name="x", passes=costs.passes, padded=True)
    assert padded.of_decode_step(passes, 10) == {"core": 20.0, "turn": 0.5}
    assert Costs(name="x", passes={}, decode_step=7.0).of_decode_step(passes, 10) == {"decode step": 7.0}
    assert Costs(name="x", passes={}, chunk=2.0, prompt_token=0.5).of_prefill(4) == 4.0
    with pytest.raises(OptionError, match="no times of 'deep' passes; it has core, turn"):
        costs.of_decode_step([("deep", 1)], 10)


def test_a_users_table(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"name": "mine", "block": {"1": 2.0, "5": 6.0}, "head": {"1": 1.0}, "prefill_ms": 0.1}))
    costs = read_costs(path, deepest=3)
    assert (costs.name, costs.largest, costs.prompt_token) == ("mine", 5, 0.1)
    assert costs.curve("core").at(3) == 4.0
    assert costs.curve("turn").at(3) == 1.0
    assert costs.curve("step").at(3) == 3 * 4.0 + 1.0  # the plain model's, where nobody says otherwise
    assert costs.curve("both").at(5) == 7.0
    yaml = tmp_path / "times.yaml"
    yaml.write_text("block: {1: 2.0, 5: 6.0}\nplain: {1: 7.0}\n")
    assert read_costs(yaml, deepest=3).curve("step").at(4) == 7.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a table with 'block'"),
        ("{}", "'block' is missing"),
        ('{"block": {"1": 1}, "blocks": 2}', "unknown blocks"),
        ('{"block": {}}', "milliseconds by rows"),
        ('{"block": {"0": 1}}', "milliseconds by rows"),
        ('{"block": {"1": -1}}', "milliseconds by rows"),
        ('{"block": {"1": 1}, "prefill_ms": "x"}', "prefill_ms must be a number"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_costs(path, 2)


def test_the_thesis_tables_cell_by_cell() -> None:
    """`tab_rrt:measured_generation_time_a100` and its 16 GB twin: 23 rows each, and some cells of them."""
    assert len(list(all_times())) == 46
    cells = {
        "40gb/gemma-2b": (43, 21.344, 0.616, 0.023),
        "40gb/gemma-2b/2": (43, 11.059, 0.265, 0.023),
        "40gb/gemma-2b/3/512": (39, 8.932, 0.237, 0.025),
        "40gb/tinyllama-1.1b/2": (233, 10.370, 0.413, 0.001),
        "40gb/pythia-1b/2/512": (53, 10.311, 0.702, 0.006),
        "16gb/gemma-2b/2/128": (115, 12.899, 0.113, 0.010),
        "16gb/tinyllama-1.1b": (1049, 22.909, 0.129, 0.001),
        "16gb/pythia-1b/2/256": (205, 8.471, 0.115, 0.002),
    }
    for name, (batch, one, most, head) in cells.items():
        times = find_times(name)
        assert times.batch == batch
        assert times.transformer.points == ((1, one), (batch, pytest.approx(batch * most)))
        assert times.head.at(batch) == pytest.approx(batch * head)
    assert find_times("16gb/gemma-2b").label == "tab_rrt:measured_generation_time_a100_16gb"


def test_the_thesis_throughput_adds_up() -> None:
    """What is printed beside the tables follows from its own columns, so nothing was mistyped on the way."""
    for table in ("40gb", "16gb"):
        rows = all_printed(table)  # type: ignore[arg-type]
        assert len(rows) == 42
        for row in rows:
            times = find_times(row.name)
            assert row.batch == times.batch or (table == "16gb" and row.batching == "CDB")
            base = next(one for one in rows if one.model == row.model and one.batching == "vanilla")
            ratio = sum((row.slimpajama, row.redpajama, row.pg19)) / sum((base.slimpajama, base.redpajama, base.pg19))
            if table == "40gb" or row.batching != "CDB":  # the 16 GB table repeats the other's depth-wise figures
                assert row.delta_v == pytest.approx(ratio, abs=0.011), row
        gemma = next(row for row in rows if row.batching == "CSB" and row.model == "gemma-2b")
        assert gemma.delta_seq == 1.0


def test_presets_as_costs() -> None:
    times = looped_preset("40gb/gemma-2b/2/64")
    assert plain_of(times).name == "40gb/gemma-2b"
    costs = preset_costs(times)
    assert costs.curve("core").at(41) == pytest.approx(41 * 0.323)
    assert costs.curve("step").at(43) == pytest.approx(43 * 0.616)
    assert costs.curve("turn").at(41) == 0.0
    assert costs.largest == 41
    ends = preset_costs(times, ends=True)
    assert ends.curve("turn").at(41) == pytest.approx(41 * 0.026)
    assert ends.curve("step").at(43) == pytest.approx(43 * 0.641)
    with pytest.raises(OptionError, match="unknown preset '40gb/gemma-2b/4'"):
        looped_preset("40gb/gemma-2b/4")
    with pytest.raises(OptionError, match="plain model, which has no depths"):
        looped_preset("40gb/gemma-2b")
    with pytest.raises(DataError, match="'block' is missing"):
        from_table({}, 2)
