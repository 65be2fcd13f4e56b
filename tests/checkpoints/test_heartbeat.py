"""Lines of progress where there is no terminal: none of short work, one every half minute of long work."""

from __future__ import annotations

import pytest

from fathomlm.checkpoints import heartbeat
from fathomlm.cli.display import TrainingBar, progress_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only a test moves on."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_long_work_prints_a_line_every_half_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("  converting", "layers") as update:
        for layer in range(1, 9):
            clock[0] += 12
            update(layer, 8, ", slowly")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["converting: 3 of 8 layers, slowly, 0:36 min", "converting: 6 of 8 layers, slowly, 1:12 min"]


def test_short_work_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("converting") as update:
        clock[0] += 29
        update(1, 2)
    assert capsys.readouterr().err == ""


def test_training_prints_a_line_where_records_are_far_apart(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingBar("tiny") as bar:
        for step in range(1, 6):
            clock[0] += 20
            bar.step(step, 100, {"loss": 2.5})
            if step == 2:
                bar.record({"kind": "train", "step": 2, "loss": 2.5})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 2 of 100: loss 2.5000, 0:40 min", "step 2: loss 2.5000", "step 4 of 100: loss 2.5000, 1:20 min"]


def test_a_bar_needs_no_lines(clock: list[float]) -> None:
    beat = heartbeat.Heartbeat(bar=True)
    clock[0] += 1000
    assert not beat.due()
