"""Training runs, for people: their curves, a table and the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from fathomlm import __version__
from fathomlm.cli.display import Rows, print_table
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.options import AXES, METRICS, Plot, PlotOptions, Runs
from fathomlm.lab.analyze.report import Draw, RunsAbout, finish, render, write_report
from fathomlm.lab.analyze.runs import (
    Points,
    Record,
    RecordedRun,
    RunSummary,
    exit_depths,
    points,
    read_runs,
    smooth,
    summarise,
    training_loss,
)
from fathomlm.lab.common import amount, optional
from fathomlm.lab.drawing import (
    DASHES,
    LINES,
    UNSELECTED,
    check_matplotlib,
    figure_over_table,
    plain_axes,
    save_figure,
    shortened,
)

FORMATS = ("png", "svg", "pdf")
COLOURS = (*LINES, UNSELECTED, "#999999")
"""Of runs; from the ninth on they come again, and the table's order tells which is which."""


def check_out(out: Path) -> str:
    """The format that a file's suffix asks for."""
    suffix = out.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise OptionError(f"{out}: a plot is written as .png, .svg or .pdf, by the name's suffix")
    return suffix


def plot(runs: Sequence[RecordedRun], out: Path, options: PlotOptions) -> list[RunSummary]:
    """Draw the runs into `out`, which appears whole or not at all, and give back the numbers that stand beside them."""
    kind = check_out(out)
    check_matplotlib()
    metrics = ("loss", "validation") if options.metric is None else (options.metric,)
    summaries = [summarise(run) for run in runs]
    colors = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
    width = 6.4 * len(metrics) if len(metrics) > 1 else 9.0
    figure, grid = figure_over_table(width, [4.4], table_of(summaries), colors, columns=len(metrics))
    drawn = 0
    for column, metric in enumerate(metrics):
        axes = figure.add_subplot(grid[0, column])
        drawn += _Panel(axes, metric, options).draw(runs, colors)
        if len(metrics) > 1:
            axes.set_title(METRICS[metric][0], fontsize=11)
    if not drawn:
        raise OptionError(f"none of the runs has recorded {' or '.join(metrics)}")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    save_figure(figure, f"{shortened(title)}: {' and '.join(METRICS[metric][0] for metric in metrics)}", out, kind)
    return summaries


def table_of(summaries: Sequence[RunSummary]) -> Rows:
    """The numbers beside the curves, a header and a row a run; losses at exits have columns of their own."""
    depths = sorted({depth for summary in summaries for depth in summary.exits}, key=int)
    header = ["run", "steps", "tokens", "tokens/s", "training", "validation", "best"]
    rows = [header + [f"exit {depth}" for depth in depths]]
    for s in summaries:
        losses = (s.loss, s.validation, s.best, *(s.exits.get(depth) for depth in depths))
        counts = [f"{s.step:,}", amount(s.tokens, digits=4), optional(s.tokens_per_s, ",.0f")]
        rows.append([s.run, *counts, *(optional(loss, ".4f") for loss in losses)])
    return rows


@dataclass(slots=True)
class _Panel:
    """One set of axes."""

    axes: Any
    metric: str
    options: PlotOptions

    def draw(self, runs: Sequence[RecordedRun], colors: Sequence[str]) -> int:
        """Draw every run that recorded the metric; how many did."""
        field = AXES[self.options.x][0]
        ends = [_x(record, field, run) for run in runs for record in (*run.train[-1:], *run.validation[-1:])]
        unit, divisor = _unit(self.options.x, max(ends))
        drawn = 0
        for run, color in zip(runs, colors, strict=True):
            drawn += self._draw_run(run, color, exit_depths(runs), partial(_x, field=field, run=run, divisor=divisor))
        title, y_unit = METRICS[self.metric]
        self.axes.set_xlabel(f"{AXES[self.options.x][1]}{f' ({unit})' if unit else ''}")
        self.axes.set_ylabel(f"{title.split(' at ')[0]}{f' ({y_unit})' if y_unit else ''}")
        plain_axes(self.axes)
        if self.options.logy:
            self.axes.set_yscale("log")
        handles, _ = self.axes.get_legend_handles_labels()
        if handles:
            self.axes.legend(fontsize=8 if len(handles) <= 10 else 6, framealpha=0.8)
        return drawn

    def _draw_run(self, run: RecordedRun, color: str, depths: Sequence[str], x: Callable[[Record], float]) -> int:
        name = shortened(run.name)
        if self.metric in ("validation", "exits"):
            drawn = self._line(points(run.validation, "loss", x), color, "-", name, marker=True)
            for depth, dash in zip(depths, cycle(DASHES[1:]), strict=False):
                drawn += self._line(points(run.validation, f"exits.{depth}", x), color, dash, f"{name}, exit {depth}", True)
            return drawn
        found = training_loss(run, x) if self.metric == "loss" else points(run.train, self.metric, x)
        if self.metric in ("mfu", "mfu_sustained"):
            found = [(at, 100 * value) for at, value in found]
            if self.metric == "mfu" and any("mfu_sustained" not in record for record in run.train):
                name += " (older record: of the sustained rate, where known)"
        factor = max(0.0, 1 - 40 / max(1, len(found))) if self.options.smooth is None else self.options.smooth
        if factor and self.metric != "lr":
            self._line(found, color, "-", None, faint=True)
            means = smooth([value for _, value in found], factor)
            found = [(at, mean) for (at, _), mean in zip(found, means, strict=True)]
        return self._line(found, color, "-", name)

    def _line(
        self, found: Points, color: str, dash: Any, label: str | None, marker: bool = False, faint: bool = False
    ) -> int:
        if not found:
            return 0
        xs, ys = zip(*found, strict=True)
        small = (marker and len(found) <= 40) or len(found) == 1
        style = {"alpha": 0.3, "linewidth": 0.8} if faint else {"linewidth": 1.5}
        self.axes.plot(xs, ys, color=color, linestyle=dash, label=label, marker="." if small else None, **style)
        return 1


def _x(record: Record, field: str, run: RecordedRun, divisor: float = 1.0) -> float:
    """Where a record stands."""
    value = record.get(field)
    if value is None:
        raise OptionError(f"run {run.name} has records without {field}; draw it over steps or tokens")
    return float(value) / divisor


def _unit(x: str, most: float) -> tuple[str, float]:
    """The unit in which the axis ends at a number of few digits, and what to divide by."""
    if x == "time":
        sizes = (("days", 172_800.0, 86_400.0), ("hours", 7200.0, 3600.0), ("minutes", 120.0, 60.0), ("seconds", 0.0, 1.0))
        return next((name, size) for name, least, size in sizes if most >= least)
    if x == "flops":
        return next(((f"{name}FLOPs", size) for name, size in _PREFIXES if most >= size), ("FLOPs", 1.0))
    letters = (("trillions", 1e12), ("billions", 1e9), ("millions", 1e6), ("thousands", 1e4))
    name, size = next(((name, size) for name, size in letters if most >= size), ("", 1.0))
    return name, 1e3 if name == "thousands" else size


_PREFIXES = (("zetta", 1e21), ("exa", 1e18), ("peta", 1e15), ("tera", 1e12), ("giga", 1e9))


def write_runs(
    runs: Sequence[RecordedRun],
    summaries: Sequence[RunSummary],
    options: PlotOptions,
    about: RunsAbout,
    out: Path,
    force: bool = False,
) -> list[Path]:
    """Losses, and every other metric that some of the runs recorded."""
    titles = {"losses": "training and validation loss"}
    draw: dict[str, Draw] = {"losses.png": partial(plot, runs, options=options)}
    for metric in _recorded(runs):
        titles[metric] = METRICS[metric][0]
        logy = options.logy and metric == "exits"
        draw[f"{metric}.png"] = partial(plot, runs, options=dataclasses.replace(options, metric=metric, logy=logy))
    numbers = {"summaries": [dataclasses.asdict(summary) for summary in summaries]}
    page = partial(render, TEMPLATE, about, summary=table_of(summaries), titles=titles)
    return write_report("runs", numbers, about, draw, page, out, force)


def _recorded(runs: Sequence[RecordedRun]) -> list[str]:
    def some(metric: str) -> bool:
        return any(points(run.train, metric, lambda record: 0.0) for run in runs)

    found = [metric for metric in ("lr", "grad_norm", "tokens_per_s", "mfu", "mfu_sustained") if some(metric)]
    return ["exits", *found] if exit_depths(runs) else found


def run(options: Runs) -> int:
    runs = read_runs(options.runs)
    summaries = [summarise(each) for each in runs]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    about = RunsAbout(name=name, runs=[str(path) for path in options.runs], x=options.curves.x, version=__version__)
    files = write_runs(runs, summaries, options.curves, about, options.directory, options.force)
    table = table_of([dataclasses.replace(summary, exits={}) for summary in summaries])
    return finish(options, about, {"summaries": [dataclasses.asdict(summary) for summary in summaries]}, [table], files)


def run_plot(options: Plot) -> int:
    check_out(options.out)
    check_matplotlib()
    summaries = plot(read_runs(options.runs), options.out, options.curves)

    def show(record: dict[str, Any]) -> None:
        """The plot's table, with exits in rows of their own: a terminal has fewer columns than a picture."""
        header, *rows = table_of([dataclasses.replace(summary, exits={}) for summary in summaries])
        table = [header]
        for row, summary in zip(rows, summaries, strict=True):
            table.append(row)
            table += [[f"  exit after {depth}", "", "", "", "", f"{loss:.4f}", ""] for depth, loss in summary.exits.items()]
        print_table(table, caption="losses in nats per token")
        print(f"wrote {options.out}")

    record = {"out": str(options.out), "runs": [dataclasses.asdict(summary) for summary in summaries]}
    return options.answer(record, show)


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: training{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: training</h1>
<p class="note">{{ about.runs | join(", ") }}</p>
{{ table(summary, "losses in nats per token") }}
{% for name, title in titles.items() %}
<h2>{{ title }}</h2>
<figure><img src="{{ images[name] }}" alt="{{ title }}"></figure>
{% endfor %}
{% endblock %}
"""
