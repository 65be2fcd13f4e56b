"""Runs read from their records, their sums, and pictures that show what was recorded."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from fathomlm.errors import OptionError, OutputError
from fathomlm.lab.analyze.options import PlotOptions
from fathomlm.lab.analyze.runs import points, read_runs, smooth, summarise, training_loss
from fathomlm.lab.analyze.runs_report import _Panel, _unit, _x, plot, table_of
from jsonl import write_jsonl
from pairwise import in_turn

METRICS = ("loss", "validation", "exits", "lr", "tokens_per_s", "grad_norm")


def write_run(directory: Path, losses: list[float], *, exits: dict[str, float] | None = None, tail: str = "") -> Path:
    """A run of a record every ten steps, 1000 tokens a step, validated at its end."""
    directory.mkdir(parents=True)
    records: list[dict] = [
        {
            "kind": "train",
            "step": 10 * i,
            "tokens": 10_000 * i,
            "seconds": 2.0 * i,
            "loss": loss + 1.0,
            "lr": 1e-3,
            "grad_norm": 0.5,
            "tokens_per_s": 4000.0 + i,
            "mfu": None,
            "flops": 6e10 * i,
            "parts": {"next_token": loss},
            "skipped": 0,
        }
        for i, loss in enumerate(losses, start=1)
    ]
    last = {key: records[-1][key] for key in ("step", "tokens", "seconds", "flops")}
    ends = (losses[-1] + 0.1, losses[-1] + 0.2)
    records += [{"kind": "validation", **last, "loss": loss, "exits": exits or {}, "best": False} for loss in ends]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return directory


def test_a_run_in_one_line(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", [5.0, 4.0, 3.0], exits={"15": 3.6, "9": 4.0})])
    found = summarise(run)
    assert (found.run, found.step, found.tokens) == ("a", 30, 30_000)
    assert found.tokens_per_s == 4002.0
    assert (found.loss, found.validation, found.best) == (3.0, 3.2, 3.1)
    assert list(found.exits.items()) == [("9", 4.0), ("15", 3.6)]
    header, row = table_of([found])
    assert header == ["run", "steps", "tokens", "tokens/s", "training", "validation", "best", "exit 9", "exit 15"]
    assert row == ["a", "30", "30K", "4,002", "3.0000", "3.2000", "3.1000", "4.0000", "3.6000"]


def test_a_half_written_line_is_passed_over(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", [5.0, 4.0], tail='{"kind": "train", "st')])
    assert len(run.train) == 2


def test_losses_that_are_not_finite_leave_a_gap(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", [5.0, float("nan"), 3.0])])
    assert training_loss(run, lambda record: record["step"]) == [(10, 5.0), (30, 3.0)]
    assert points(run.train, "mfu", lambda record: record["step"]) == []


def test_runs_are_found_in_a_directory_once_and_told_apart(tmp_path):
    write_run(tmp_path / "old" / "tiny", [5.0])
    write_run(tmp_path / "new" / "tiny", [4.0])
    runs = read_runs([tmp_path / "old", tmp_path / "new" / "tiny" / "metrics.jsonl", tmp_path / "new"])
    assert [run.name for run in runs] == ["old/tiny", "new/tiny"]


def test_a_run_of_a_directory_that_recorded_nothing_is_left_out(tmp_path, capsys):
    write_run(tmp_path / "good", [5.0])
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").write_text("")
    assert [run.name for run in read_runs([tmp_path])] == ["good"]
    assert capsys.readouterr().err == f"left out: {begun}/metrics.jsonl holds no record of training yet\n"
    for named in (begun, begun / "metrics.jsonl"):
        with pytest.raises(OptionError, match="holds no record of training yet"):
            read_runs([tmp_path, named])
    (tmp_path / "good" / "metrics.jsonl").write_text("")
    with pytest.raises(OptionError, match="holds no record of training yet"):
        read_runs([tmp_path])


def test_smoothing_keeps_the_start_and_a_flat_line():
    assert smooth([5.0, 5.0, 5.0], 0.9) == pytest.approx([5.0, 5.0, 5.0])
    assert smooth([4.0, 2.0], 0.5) == pytest.approx([4.0, (0.25 * 4 + 0.5 * 2) / 0.75])
    assert smooth([4.0, 2.0], 0.0) == [4.0, 2.0]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_appears_whole(tmp_path, suffix):
    runs = read_runs([write_run(tmp_path / "a", [5.0, 4.0], exits={"3": 4.5}), write_run(tmp_path / "b", [5.0, 4.5])])
    out = tmp_path / f"curves.{suffix}"
    plot(runs, out, PlotOptions())
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert out.read_bytes().startswith(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", out.name]


def test_the_picture_says_what_it_shows(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    long = "a-run-with-a-name-that-is-longer-than-any-legend-bears"
    runs = read_runs([write_run(tmp_path / "short", [5.0, 4.0], exits={"3": 4.5}), write_run(tmp_path / long, [5.0, 4.5])])
    plot(runs, tmp_path / "curves.svg", PlotOptions(x="flops"))
    text = (tmp_path / "curves.svg").read_text()
    for shown in ("short, exit 3", "training compute (gigaFLOPs)", "validation loss (nats per token)", "4.5000", "2 runs:"):
        assert shown in text
    assert long not in text
    assert "a-run-with-a-na…ny-legend-bears" in text


@pytest.mark.parametrize(
    ("metric", "x"), [*in_turn(METRICS, ("tokens", "steps"), 0), *in_turn(METRICS, ("time", "flops"), 0)]
)
@pytest.mark.usefixtures("coarse_figures")
def test_every_metric_over_every_axis(tmp_path, metric, x):
    runs = read_runs([write_run(tmp_path / "a", [5.0, 4.0, 3.0], exits={"3": 4.5})])
    plot(runs, tmp_path / "curves.svg", PlotOptions(x=x, metric=metric, logy=True, smooth=0.0))


def test_validation_stands_where_its_tokens_put_it(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", [5.0, 4.0])])
    assert _x(run.validation[0], "flops", run) == 12e10
    assert _x(run.train[0], "seconds", run, divisor=2.0) == 1.0


@pytest.mark.parametrize(
    ("x", "most", "unit", "divisor"),
    [
        ("steps", 900, "", 1.0),
        ("steps", 41_685, "thousands", 1e3),
        ("tokens", 15e9, "billions", 1e9),
        ("time", 90, "seconds", 1.0),
        ("time", 9000, "hours", 3600.0),
        ("flops", 5e16, "petaFLOPs", 1e15),
        ("flops", 5e3, "FLOPs", 1.0),
    ],
)
def test_axes_end_at_short_numbers(x, most, unit, divisor):
    assert _unit(x, most) == (unit, divisor)


def test_utilisation_of_older_records_is_said_to_be_of_the_sustained_rate(tmp_path, monkeypatch):
    """They have `mfu` alone. A new record has both, or null where the sustained rate is not known."""
    for name, more in (("old", {"mfu": 0.5}), ("new", {"mfu": 0.4, "mfu_sustained": 0.5})):
        file = write_run(tmp_path / name, [5.0, 4.0]) / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        write_jsonl(file, (record | more for record in records))
    labels = []
    monkeypatch.setattr(_Panel, "_line", lambda self, found, *rest, **more: labels.append((rest[2], found)) or 1)
    runs = read_runs([tmp_path / "old", tmp_path / "new"])
    plot(runs, tmp_path / "a.png", PlotOptions(metric="mfu", smooth=0))
    assert [(label, [y for _, y in found]) for label, found in labels] == [
        ("old (older record: of the sustained rate, where known)", [50.0, 50.0]), ("new", [40.0, 40.0])
    ]  # fmt: skip
    labels.clear()
    plot(runs, tmp_path / "b.png", PlotOptions(metric="mfu_sustained", smooth=0))
    assert [(label, [y for _, y in found]) for label, found in labels] == [("old", []), ("new", [50.0, 50.0])]


def test_what_cannot_be_drawn_is_said_before_anything_is_written(tmp_path):
    run = write_run(tmp_path / "a", [5.0, 4.0])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(OptionError, match="no record of training yet"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(OptionError, match="there is no run at"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "other").mkdir()
    with pytest.raises(OptionError, match=r"holds no metrics\.jsonl"):
        read_runs([tmp_path / "other"])
    with pytest.raises(OptionError, match="recorded mfu"):
        plot(read_runs([run]), tmp_path / "curves.png", PlotOptions(metric="mfu"))
    with pytest.raises(OptionError, match=r"\.png, \.svg or \.pdf"):
        plot(read_runs([run]), tmp_path / "curves.gif", PlotOptions())
    with pytest.raises(OutputError, match="cannot write"):
        plot(read_runs([run]), tmp_path / "missing" / "curves.png", PlotOptions())
    assert not list(tmp_path.glob("*.png"))


def test_options_are_checked():
    with pytest.raises(OptionError, match="did you mean 'loss'"):
        PlotOptions(metric="los")
    with pytest.raises(OptionError, match="invalid x 'epochs'"):
        PlotOptions(x="epochs")
    with pytest.raises(OptionError, match=r"smooth must be between 0 and 0\.99"):
        PlotOptions(smooth=1.0)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name: str, *rest: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    runs = read_runs([write_run(tmp_path / "a", [5.0])])
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(OptionError, match=r"pip install 'fathomlm\[plot\]'"):
        plot(runs, tmp_path / "curves.png", PlotOptions())
