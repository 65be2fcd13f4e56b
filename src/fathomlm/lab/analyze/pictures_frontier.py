"""Quality against latency and against FLOPs, one line a model, the adaptive threshold's point marked (thesis 2.6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fathomlm.checkpoints.writing import whole_file
from fathomlm.lab.analyze.drawing import LINES, draw_table, new_figure, plain_axes, set_title, shortened

MARKS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
CLOSE = 0.05
"""Points that are nearer than this part of both axes share one label."""


class PointLike(Protocol):
    """What is drawn of a setting."""

    @property
    def kind(self) -> str: ...
    @property
    def value(self) -> float | None: ...
    @property
    def quality(self) -> float: ...
    @property
    def relative_latency(self) -> float: ...
    @property
    def relative_flops(self) -> float: ...


class CurveLike(Protocol):
    """What is drawn of a model."""

    @property
    def model(self) -> str: ...
    @property
    def points(self) -> Sequence[PointLike]: ...


def draw_frontier(
    curves: Sequence[CurveLike], table: list[list[str]], out: Path, *, sweep: str, quality: str, lower: bool = False
) -> None:
    """`quality` names the axis and its unit; `lower` says that less of it is better. The first column of `table` names the
    models in their order."""
    table_height = 0.27 * (len(table) + 1)
    figure = new_figure(13.2, 5.4 + table_height + 0.5)
    grid = figure.add_gridspec(2, 2, height_ratios=(5.4, table_height))
    colours = [LINES[place % len(LINES)] for place in range(len(curves))]
    for column, (field, label) in enumerate(
        (("relative_latency", "measured time per token"), ("relative_flops", "forward FLOPs per token"))
    ):
        axes = figure.add_subplot(grid[0, column])
        for place, curve in enumerate(curves):
            _draw_curve(axes, curve, field, colours[place], MARKS[place % len(MARKS)], DASHES[place % len(DASHES)])
        axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{label} (part of {shortened(curves[0].model)} at full depth)")
        axes.set_ylabel(f"{quality}{', less is better' if lower else ''}")
        if lower and max(point.quality for curve in curves for point in curve.points) > 20 * min(
            point.quality for curve in curves for point in curve.points
        ):
            axes.set_yscale("log")
        plain_axes(axes)
        axes.legend(fontsize=8, framealpha=0.85)
    draw_table(figure.add_subplot(grid[1, :]), table, colours)
    name = shortened(curves[0].model) if len(curves) == 1 else f"{len(curves)} models"
    set_title(figure, f"{name}: {quality.split(' (')[0]} against cost, by {sweep}")
    with whole_file(out) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw_curve(axes: Any, curve: CurveLike, field: str, colour: str, mark: str, dash: Any) -> None:
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
            star = {"markersize": 16, "markeredgecolor": "black", "markeredgewidth": 0.7, "zorder": 5}
            label = f"{name}, adaptive threshold {point.value:.3f}"
            axes.plot([getattr(point, field)], [point.quality], "*", color=colour, linestyle="none", label=label, **star)
    for point in _apart(swept, field):
        place = (getattr(point, field), point.quality)
        axes.annotate(f"{point.value:g}", place, textcoords="offset points", xytext=(5, 5), fontsize=7, color=colour)


def _apart(points: Sequence[PointLike], field: str) -> list[PointLike]:
    """Points whose values can stand beside them without covering each other."""
    qualities = [point.quality for point in points]
    high = (max(qualities) - min(qualities) if points else 0.0) or 1.0
    kept: list[PointLike] = []
    for point in points:
        near = (
            abs(getattr(point, field) - getattr(other, field)) < CLOSE and abs(point.quality - other.quality) < CLOSE * high
            for other in kept
        )
        if not any(near):
            kept.append(point)
    return kept
