"""What exits would do: confidences by agreement, every layer against the last, and where decoding spends its time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fathomlm.lab.analyze.breakdown import PARTS, Breakdown
from fathomlm.lab.analyze.drawing import (
    LINES,
    SELECTED,
    UNSELECTED,
    draw_table,
    new_figure,
    plain_axes,
    set_title,
    shortened,
)
from fathomlm.lab.analyze.exits import ExitNumbers
from fathomlm.lab.analyze.pictures_threshold import draw_fit
from fathomlm.lab.analyze.tables_exits import fit_table, time_table

STYLES: dict[str, tuple[str, str | None]] = {
    "embedding": ("#000000", None),
    "attention": ("#0072B2", None),
    "feed-forward": ("#56B4E9", None),
    "norms": ("#BBBBBB", None),
    "head": ("#009E73", None),
    "exit heads": ("#D55E00", "///"),
    "cache": ("#F0E442", None),
    "copying": ("#CC79A7", "..."),
    "rest": ("#EEEEEE", "xxx"),
}
"""Colours of Okabe and Ito and two greys; what only early exits pay for is hatched."""
COLUMNS = 2


def draw_confidence(numbers: ExitNumbers, name: str, out: Path) -> None:
    """A panel for each exit, the numbers under them."""
    table = fit_table(numbers)
    lines = math.ceil(len(numbers.exits) / COLUMNS)
    columns = min(COLUMNS, len(numbers.exits))
    table_height = 0.27 * (len(table) + 1)
    figure = new_figure(7.4 * columns if columns > 1 else 9.0, 4.8 * lines + table_height + 0.5)
    grid = figure.add_gridspec(lines + 1, columns, height_ratios=(*[4.8] * lines, table_height))
    for place, fit in enumerate(numbers.exits):
        draw_fit(figure.add_subplot(grid[divmod(place, columns)]), fit.estimator, f"exit after layer {fit.layer}")
    draw_table(figure.add_subplot(grid[lines, :]), table, ["black"] * (len(table) - 1))
    what = f"confidence '{numbers.confidence}' by agreement with the last layer"
    set_title(figure, f"{shortened(name)}: {what}, {numbers.rows * numbers.context:,} tokens")
    figure.savefig(out, format="png", dpi=150)


def draw_layers(numbers: ExitNumbers, name: str, out: Path) -> None:
    """Agreement and accuracy, loss, cosine, and where the oracle would leave, over the layers."""
    figure = new_figure(12.8, 8.6)
    grid = figure.add_gridspec(2, 2)
    panels = [figure.add_subplot(grid[place]) for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    layers = [each.layer for each in numbers.layers]
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 4, "clip_on": False}

    def line(axes: Any, field: str, colour: str, mark: str, label: str, dash: str = "-") -> None:
        values = [getattr(each, field) for each in numbers.layers]
        shown = [math.nan if value is None else value for value in values]
        axes.plot(layers, shown, color=colour, marker=mark, linestyle=dash, label=label, **style)

    agreement, loss, cosine, oracle = panels
    line(agreement, "agreement", LINES[0], "o", "chooses the last layer's token")
    line(agreement, "accuracy", LINES[1], "s", "chooses the token that follows", "--")
    line(agreement, "confidence", LINES[2], "^", f"mean confidence ({numbers.confidence})", ":")
    _name(agreement, "agreement with the last layer", "part of the tokens")
    agreement.set_ylim(0, 1.02)
    line(loss, "loss", LINES[0], "o", "every token leaves there")
    _name(loss, "static exiting (observation 2)", "loss (nats per token)")
    line(cosine, "cosine", LINES[0], "o", "all tokens")
    line(cosine, "cosine_agreed", LINES[1], "s", "tokens that already choose the last layer's", "--")
    cosine.axhline(numbers.oracle_cosine, color="0.35", linestyle=":", label=f"oracle's exits, {numbers.oracle_cosine:.3f}")
    _name(cosine, "state against the last layer's (observation 1)", "mean cosine")
    width = 0.42
    for shift, field, colour, hatch, label in (
        (-width / 2, "first", SELECTED, None, f"first that agrees (oracle), mean {numbers.oracle_layer:.2f}"),
        (width / 2, "settled", UNSELECTED, "////", f"agrees from there on, mean {numbers.settled_layer:.2f}"),
    ):
        heights = [getattr(each, field) for each in numbers.layers]
        oracle.bar(
            [layer + shift for layer in layers], heights, width, color=colour, hatch=hatch, edgecolor="white", label=label
        )
    _name(oracle, "how early a token could leave", "part of the tokens")
    for axes in panels:
        _mark_recursions(axes, numbers)
        axes.legend(fontsize=8, framealpha=0.85)
    set_title(figure, f"{shortened(name)}: every layer against the last, {numbers.rows * numbers.context:,} tokens")
    figure.savefig(out, format="png", dpi=150)


def _name(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5)
    axes.set_xlabel("layer")
    axes.set_ylabel(unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    plain_axes(axes)


def _mark_recursions(axes: Any, numbers: ExitNumbers) -> None:
    """A line behind the last layer of each pass through a shared block."""
    pairs = zip(numbers.layers, numbers.layers[1:], strict=False)
    for place, (here, after) in enumerate((a, b) for a, b in pairs if a.recursion != b.recursion):
        label = "recursions begin and end" if place == 0 else None
        axes.axvline((here.layer + after.layer) / 2, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), label=label)


def draw_times(breakdown: Breakdown, name: str, out: Path) -> None:
    """A bar for each way of decoding, as long as its time against full depth."""
    table = time_table(breakdown)
    table_height = 0.27 * (len(table) + 1)
    figure = new_figure(10.4, 3.9 + table_height + 0.5)
    grid = figure.add_gridspec(2, 1, height_ratios=(3.9, table_height))
    axes = figure.add_subplot(grid[0])
    places = range(len(breakdown.modes))
    starts = [0.0] * len(breakdown.modes)
    for part in PARTS:
        lengths = [100 * mode.relative * mode.shares[part] for mode in breakdown.modes]
        if not any(length > 0 for length in lengths):
            continue
        colour, hatch = STYLES[part]
        axes.barh(places, lengths, 0.6, left=starts, color=colour, hatch=hatch, edgecolor="0.25", linewidth=0.5, label=part)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.set_yticks(places, [f"{mode.name}\n({mode.exit_rate:.0%} left early)" for mode in breakdown.modes])
    axes.invert_yaxis()
    axes.axvline(100, color="0.35", linestyle=":", linewidth=1.0)
    axes.set_xlabel("time per token (% of full depth)")
    plain_axes(axes)
    axes.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(PARTS), frameon=False)
    draw_table(figure.add_subplot(grid[1]), table, ["black"] * (len(table) - 1))
    set_title(figure, f"{shortened(name)}: where decoding spends its time, threshold {breakdown.threshold:.3f}")
    figure.savefig(out, format="png", dpi=150)
