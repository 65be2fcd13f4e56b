"""Router scores, and what more depth at inference brings (thesis 4.6.2 and 4.6.3, their two figures)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from fathomlm.lab.analyze.routing import DepthLimit, RoutingNumbers
from fathomlm.lab.analyze.scores import Histogram
from fathomlm.lab.analyze.tables import scaling_table, score_table

ACROSS = 3
"""Panels side by side."""
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def draw_scores(numbers: RoutingNumbers, name: str, out: Path) -> None:
    """A panel for each recursion (expert) or depth (token), and the numbers under them."""
    histograms = numbers.histograms
    across = min(ACROSS, len(histograms))
    down = -(-len(histograms) // across)
    table_height = 0.27 * (len(histograms) + 2)
    figure = new_figure(4.4 * across if across > 1 else 6.4, 3.2 * down + table_height + 0.5)
    grid = figure.add_gridspec(down + 1, across, height_ratios=[*[3.2] * down, table_height])
    for at, histogram in enumerate(histograms):
        _draw_histogram(figure.add_subplot(grid[at // across, at % across]), histogram, numbers)
    draw_table(figure.add_subplot(grid[down, :]), score_table(numbers), ["black"] * len(histograms))
    what = "top-k selection" if numbers.router == "expert" else "the depth that tokens chose"
    set_title(figure, f"{shortened(name)}: router scores by {what}")
    figure.savefig(out, format="png", dpi=150)


def draw_scaling(numbers: RoutingNumbers, name: str, out: Path) -> None:
    """Loss by maximum depth, cumulative log-likelihood by position, what depth adds to it, and the numbers under them."""
    limits = numbers.scaling
    table_height = 0.27 * (len(limits) + 2)
    figure = new_figure(13.2, 3.8 + table_height + 0.5)
    grid = figure.add_gridspec(2, 3, height_ratios=(3.8, table_height))
    colours = [LINES[at % len(LINES)] for at in range(len(limits))]
    _draw_losses(figure.add_subplot(grid[0, 0]), limits, colours)
    totals, gains = (figure.add_subplot(grid[0, column]) for column in (1, 2))
    first = limits[0].log_likelihood
    for at, (limit, colour) in enumerate(zip(limits, colours, strict=True)):
        style = {"color": colour, "linestyle": DASHES[at % len(DASHES)], "label": f"at most {limit.max_depth}"}
        places = range(1, len(first) + 1)
        totals.plot(places, limit.log_likelihood, **style)
        gains.plot(places, [value - base for value, base in zip(limit.log_likelihood, first, strict=True)], **style)
    for axes, title, unit in (
        (totals, "log-likelihood up to a position", "sum of log p (nats)"),
        (gains, "what depth adds to it", "more than at depth 1 (nats)"),
    ):
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel("position in the row (tokens)")
        axes.set_ylabel(unit)
        plain_axes(axes)
        axes.legend(title="recursions", fontsize=8, title_fontsize=8, framealpha=0.8)
    draw_table(figure.add_subplot(grid[1, :]), scaling_table(numbers), colours)
    set_title(figure, f"{shortened(name)}: test-time scaling, {numbers.rows} rows of {numbers.context:,} tokens")
    figure.savefig(out, format="png", dpi=150)


def _draw_histogram(axes: Any, histogram: Histogram, numbers: RoutingNumbers) -> None:
    asked = max(sum(histogram.selected) + sum(histogram.unselected), 1)
    width = histogram.edges[1] - histogram.edges[0]
    for counts, colour, hatch, label in (
        (histogram.selected, SELECTED, None, "selected"),
        (histogram.unselected, UNSELECTED, "////", "not selected"),
    ):
        if not sum(counts):
            continue
        heights = [100 * count / asked for count in counts]
        axes.bar(
            histogram.edges[:-1],
            heights,
            width,
            align="edge",
            color=colour,
            alpha=0.75,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.3,
            label=label,
        )
    if numbers.threshold is not None and not histogram.takes_all:
        axes.axvline(numbers.threshold, color="black", linewidth=1.0, linestyle="--", label="causal rule")
    capacity = numbers.capacity[histogram.recursion - 1]
    expert = numbers.router == "expert"
    note = "takes every token" if histogram.takes_all else f"keeps {100 * capacity:.3g}% of a row"
    title = f"recursion {histogram.recursion}: {note}" if expert else f"depth {histogram.recursion}"
    axes.set_title(title, fontsize=10.5)
    low, high = histogram.edges[0], histogram.edges[-1]
    axes.set_xlim(low, high)
    axes.set_xticks([low + (high - low) * i / 4 for i in range(5)])
    axes.set_xlabel("router score")
    axes.set_ylabel("part of the tokens asked (%)" if expert else "part of the tokens (%)")
    plain_axes(axes)
    axes.margins(y=0.25)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize=8, framealpha=0.8, loc="upper center", ncols=len(handles), handlelength=1.4, columnspacing=1.0)


def _draw_losses(axes: Any, limits: Sequence[DepthLimit], colours: Sequence[str]) -> None:
    losses = [limit.loss for limit in limits]
    bars = axes.bar([str(limit.max_depth) for limit in limits], losses, color=colours, width=0.6)
    axes.bar_label(bars, [f"{loss:.4f}" for loss in losses], padding=2, fontsize=8 if len(limits) < 7 else 6)
    spread = max(losses) - min(losses)
    low = max(0.0, min(losses) - max(spread, 1e-3 * max(losses)))
    axes.set_ylim(low, max(losses) + 0.15 * (max(losses) - low))
    axes.set_title(f"loss by depth{'' if low == 0 else ' (axis does not begin at 0)'}", fontsize=10.5)
    axes.set_xlabel("recursions at most")
    axes.set_ylabel("next-token loss (nats per token)")
    plain_axes(axes)
    axes.grid(visible=False, axis="x")
