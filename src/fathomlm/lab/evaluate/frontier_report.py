"""Quality against cost for people: tables, and a picture of quality against latency and FLOPs, one line a model, with the
adaptive threshold's point marked (thesis 2.6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathomlm.lab.drawing import DASHES, LINES, MARKERS, STAR, figure_over_table, plain_axes, save_figure, shortened
from fathomlm.lab.evaluate.frontier import SweepPoint, TradeOffCurve, frontier
from fathomlm.lab.tables import Rows

CLOSE = 0.05
"""Points that are nearer than this part of both axes share one label."""


def point_table(curve: TradeOffCurve, quality: str) -> Rows:
    """A row a setting, with what lies on the frontier marked."""
    best = frontier([(point.relative_latency, point.score) for point in curve.points])
    rows = [["setting", quality, "ms/token", "latency", "FLOPs", "early", "best"]]
    for point, on in zip(curve.points, best, strict=True):
        left = "-" if point.exit_rate is None else f"{point.exit_rate:.1%}"
        costs = [f"{point.ms_per_token:.2f}", f"{point.relative_latency:.3f}", f"{point.relative_flops:.3f}"]
        rows.append([point.name, f"{point.quality:.4g}", *costs, left, "yes" if on else ""])
    return rows


def summary_table(curves: Sequence[TradeOffCurve]) -> Rows:
    """A row a model."""
    rows = [["model", "full quality", "ms/token", "latency area", "FLOPs area", "adaptive"]]
    for curve in curves:
        full = next(point for point in curve.points if point.kind == "full")
        found = next((point for point in curve.points if point.kind == "adaptive"), None)
        adaptive = "-" if found is None else f"{found.value:.3f}: {found.quality:.4g} at {found.relative_latency:.2f}x"
        areas = [f"{curve.latency_area:.4f}", f"{curve.flops_area:.4f}"]
        rows.append([curve.model, f"{full.quality:.4g}", f"{full.ms_per_token:.2f}", *areas, adaptive])
    return rows


def draw_frontier(
    curves: Sequence[TradeOffCurve], table: Rows, out: Path, *, sweep: str, quality: str, lower: bool = False
) -> None:
    """`quality` names the axis and its unit; `lower` says that less of it is better. The first column of `table` names the
    models in their order."""
    colours = [LINES[place % len(LINES)] for place in range(len(curves))]
    figure, grid = figure_over_table(13.2, [5.4], table, colours, columns=2)
    qualities = [point.quality for curve in curves for point in curve.points]
    for column, (field, label) in enumerate(
        (("relative_latency", "measured time per token"), ("relative_flops", "forward FLOPs per token"))
    ):
        axes = figure.add_subplot(grid[0, column])
        for place, curve in enumerate(curves):
            _draw_curve(axes, curve, field, colours[place], MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)])
        axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlim(left=0)
        if lower and max(qualities) > 20 * min(qualities):
            axes.set_yscale("log")
        cost = f"{label} (part of {shortened(curves[0].model)} at full depth)"
        plain_axes(axes, x=cost, y=f"{quality}{', less is better' if lower else ''}")
        axes.legend(fontsize=8, framealpha=0.85)
    name = shortened(curves[0].model) if len(curves) == 1 else f"{len(curves)} models"
    save_figure(figure, f"{name}: {quality.split(' (')[0]} against cost, by {sweep}", out)


def _draw_curve(axes: Any, curve: TradeOffCurve, field: str, colour: str, mark: str, dash: Any) -> None:
    swept = [point for point in curve.points if point.kind == "sweep"]
    full = [point for point in curve.points if point.kind == "full"]
    ordered = [*swept, *full]
    name = shortened(curve.model)
    xs, ys = [getattr(point, field) for point in ordered], [point.quality for point in ordered]
    axes.plot(xs, ys, color=colour, marker=mark, linestyle=dash, linewidth=1.4, markersize=5, label=name)
    for point in full:
        edge = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
        axes.plot(
            [getattr(point, field)], [point.quality], marker="o", linestyle="none", label=f"{name}, full depth", **edge
        )
    for point in curve.points:
        if point.kind == "adaptive":
            label = f"{name}, adaptive threshold {point.value:.3f}"
            at = [getattr(point, field)], [point.quality]
            axes.plot(*at, color=colour, markersize=16, zorder=5, label=label, **STAR)
    for point in _apart(swept, field):
        place = (getattr(point, field), point.quality)
        axes.annotate(f"{point.value:g}", place, textcoords="offset points", xytext=(5, 5), fontsize=7, color=colour)


def _apart(points: Sequence[SweepPoint], field: str) -> list[SweepPoint]:
    """Points whose values can stand beside them without covering each other."""
    qualities = [point.quality for point in points]
    high = (max(qualities) - min(qualities) if points else 0.0) or 1.0
    kept: list[SweepPoint] = []
    for point in points:
        near = (
            abs(getattr(point, field) - getattr(other, field)) < CLOSE and abs(point.quality - other.quality) < CLOSE * high
            for other in kept
        )
        if not any(near):
            kept.append(point)
    return kept
