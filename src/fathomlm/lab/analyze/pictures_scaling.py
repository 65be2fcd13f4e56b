"""Loss over model size for each architecture and budget, the best sizes marked (`fig_mor:isoflops_qualitative-a`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import whole_file
from fathomlm.lab.analyze.drawing import LINES, draw_table, new_figure, plain_axes, set_title
from fathomlm.lab.analyze.scaling import Fit
from fathomlm.lab.analyze.tables_plan import fit_table

MARKS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
POINTS = 100


def draw_scaling_fits(fits: Sequence[Fit], out: Path, kind: str = "png") -> None:
    """A colour and a mark for each architecture, a line style for each budget, stars where a curve is lowest."""
    table = fit_table(fits)
    table_height = 0.27 * (len(table) + 1)
    figure = new_figure(10.4, 5.2 + table_height + 0.5)
    grid = figure.add_gridspec(2, 1, height_ratios=(5.2, table_height))
    axes = figure.add_subplot(grid[0])
    kinds = sorted({fit.architecture for fit in fits})
    colours = {name: LINES[i % len(LINES)] for i, name in enumerate(kinds)}
    for name in kinds:
        own = sorted((fit for fit in fits if fit.architecture == name), key=lambda fit: fit.flops)
        for place, fit in enumerate(own):
            dash = DASHES[place % len(DASHES)]
            _draw_fit(axes, fit, colours[name], MARKS[kinds.index(name) % len(MARKS)], dash)
        stars = [(fit.best_parameters, fit.best_loss) for fit in own if fit.inside]
        if len(stars) > 1:
            label = f"{name}: the best sizes"
            axes.plot(*zip(*stars, strict=True), color=colours[name], linewidth=2.4, alpha=0.35, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("parameters without embeddings")
    axes.set_ylabel("validation loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, place: _short(value))
    axes.xaxis.set_minor_formatter(lambda value, place: _short(value) if str(value)[0] in "25" else "")
    plain_axes(axes)
    axes.legend(fontsize=8, framealpha=0.85)
    draw_table(figure.add_subplot(grid[1]), table, [colours[fit.architecture] for fit in fits])
    set_title(figure, "Loss by model size under equal compute; stars are the lowest points of the fits")
    with whole_file(out) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def _draw_fit(axes: Any, fit: Fit, colour: str, mark: str, dash: Any) -> None:
    label = f"{fit.architecture}, {fit.flops:.3g} FLOPs"
    alone = fit.coefficients is None
    axes.plot(fit.sizes, fit.losses, color=colour, marker=mark, linestyle="none", label=label if alone else None)
    if alone:
        return
    ends = [*fit.sizes, *([fit.best_parameters] if fit.inside and fit.best_parameters is not None else [])]
    low, high = math.log(min(ends)), math.log(max(ends))
    xs = [math.exp(low + (high - low) * at / POINTS) for at in range(POINTS + 1)]
    axes.plot(xs, [fit.at(x) for x in xs], color=colour, linestyle=dash, linewidth=1.5, label=label)
    if fit.inside:
        star: dict[str, Any] = {"marker": "*", "markersize": 15, "markeredgecolor": "black", "markeredgewidth": 0.6}
        axes.plot([fit.best_parameters], [fit.best_loss], color=colour, linestyle="none", zorder=4, **star)


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"
