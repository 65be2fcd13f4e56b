"""The thesis' throughput comes out again: direction always, size as near as what it prints allows."""

from __future__ import annotations

import pytest

from fathomlm.lab.simulate.thesis import all_printed, fit_mean, implied_depths, lengths, parts_for, thesis_table


def test_parts_have_the_mean_that_was_asked_for() -> None:
    for depth, deepest in ((1.2, 2), (1.9, 3), (3.0, 3)):
        parts = parts_for(depth, deepest)
        assert parts[0] == 1.0
        assert len(parts) == deepest
        assert sum(parts) == pytest.approx(depth)
    assert sum(parts_for(0.5, 2)) == pytest.approx(1.001)


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    drawn = lengths(0.35, 4000)
    assert sum(drawn) / len(drawn) == pytest.approx(0.35 * 32, rel=0.03)
    assert (min(drawn), max(drawn)) == (1, 32)
    assert fit_mean(655, 400) < fit_mean(1228, 400)


def test_depths_that_the_printed_throughput_implies() -> None:
    """Four ranks of one model, trained alike: the times differ by a third, and the depths come out the same."""
    rows = [row for row in all_printed("40gb") if (row.model, row.blocks, row.coefficient) == ("gemma-2b", 2, 0.1)]
    relaxed = [implied_depths(row)["slimpajama"] for row in rows if row.rank]
    assert len(relaxed) == 4
    assert max(relaxed) - min(relaxed) < 0.01
    assert implied_depths(rows[0])["slimpajama"] == pytest.approx(1000 / 0.265 / 3159)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "most"), [("40gb", (0.05, 0.03)), ("16gb", (0.09, 0.04))])
def test_both_tables(table: str, most: tuple[float, float]) -> None:
    found = thesis_table(table, sequences=2000)  # type: ignore[arg-type]
    assert len(found.rows) == 36
    assert found.error("delta_v") < most[0]
    assert found.error("delta_seq") < most[1]
    slower = {row.printed.name for row in found.rows if row.delta_seq < 1}
    assert slower == {row.printed.name for row in found.rows if row.printed.delta_seq < 1}


def test_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.lab.simulate import thesis

    few = [row for row in all_printed("40gb") if row.model == "gemma-2b" and (row.blocks == 1 or row.name.endswith("/2"))]
    assert [row.batching for row in few] == ["vanilla", "CSB", "CDB"]
    monkeypatch.setattr(thesis, "all_printed", lambda table: few)
    found = thesis_table("40gb", sequences=600)
    (row,) = found.rows
    assert row.delta_v == pytest.approx(2.66, rel=0.06)
    assert row.delta_seq == pytest.approx(1.88, rel=0.03)
    (base,) = found.baselines
    assert base.vanilla["slimpajama"] == pytest.approx(655, rel=0.02)
    assert base.vanilla["pg19"] == pytest.approx(base.sequence["pg19"])  # all its texts are equally long
    assert base.vanilla["pg19"] == pytest.approx(1357, rel=0.04)
    assert base.sequence["redpajama"] == pytest.approx(1604, rel=0.05)
