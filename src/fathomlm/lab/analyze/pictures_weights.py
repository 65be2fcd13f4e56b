"""Captured energy by rank for each kind of linear, and the rank that each step needs (thesis 3.3.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fathomlm.lab.analyze.drawing import LINES, draw_table, new_figure, plain_axes, set_title, shortened
from fathomlm.lab.analyze.tables_weights import rank_table
from fathomlm.lab.analyze.weights import WeightNumbers, bands

COLUMNS = 4
DASHES = ("-", "--", ":", "-.")
SHARE = 0.9
TICKS = 16


def draw_energy(numbers: WeightNumbers, name: str, out: Path) -> None:
    """A panel a linear: the mean over steps as a line, the least and the most as a band; the table under them."""
    table = rank_table(numbers)
    columns = min(COLUMNS, len(numbers.linears))
    lines = math.ceil(len(numbers.linears) / columns)
    table_height = 0.25 * (len(table) + 1)
    figure = new_figure(3.7 * columns, 3.1 * lines + table_height + 0.9)
    grid = figure.add_gridspec(lines + 1, columns, height_ratios=(*[3.1] * lines, table_height))
    axes: Any = None
    for place, linear in enumerate(numbers.linears):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        for number, init in enumerate(numbers.inits):
            band = bands(numbers, init, linear)
            ranks = range(1, len(band["mean"]) + 1)
            colour = LINES[number % len(LINES)]
            axes.fill_between(ranks, band["least"], band["most"], color=colour, alpha=0.18, linewidth=0)
            label = f"{init} (mean; band: all steps)"
            axes.plot(ranks, band["mean"], color=colour, linestyle=DASHES[number % len(DASHES)], linewidth=1.7, label=label)
        axes.axhline(SHARE, color="0.5", linewidth=0.8, linestyle=(0, (4, 3)), label=f"{SHARE:.0%} of the energy")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, at: f"{value:g}")
        axes.set_ylim(0, 1.02)
        axes.set_title(linear, fontsize=10.5)
        axes.set_xlabel("rank")
        axes.set_ylabel("captured energy (part)")
        plain_axes(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    draw_table(figure.add_subplot(grid[lines, :]), table, ["black"] * (len(table) - 1))
    set_title(figure, f"{shortened(name)}: how much of what tying takes away a rank gives back ({_plan(numbers)})")
    figure.savefig(out, format="png", dpi=150)


def draw_ranks(numbers: WeightNumbers, name: str, out: Path) -> None:
    """A map for each initialisation: the rank that each step needs on each linear, against the full rank."""
    from matplotlib.colors import Normalize

    inits, linears = numbers.inits, numbers.linears
    steps = [each.step for each in numbers.of(inits[0], linears[0])]
    figure = new_figure(max(7.0, 0.34 * len(steps) + 3.0), 0.42 * len(linears) * len(inits) + 1.4 * len(inits) + 0.8)
    grid = figure.add_gridspec(len(inits), 1)
    image = None
    for place, init in enumerate(inits):
        axes = figure.add_subplot(grid[place])
        rows = [numbers.of(init, linear) for linear in linears]
        parts = [[each.rank_for(SHARE) / each.full_rank for each in row] for row in rows]
        image = axes.imshow(parts, aspect="auto", cmap="viridis_r", norm=Normalize(0, 1), interpolation="nearest")
        if len(steps) <= 40:
            for y, row in enumerate(rows):
                for x, each in enumerate(row):
                    ink = "white" if parts[y][x] > 0.55 else "black"
                    axes.text(x, y, str(each.rank_for(SHARE)), ha="center", va="center", fontsize=6.5, color=ink)
        every = max(1, -(-len(steps) // TICKS))
        axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]], fontsize=8)
        axes.set_yticks(
            range(len(linears)), [f"{name} ({row[0].full_rank})" for name, row in zip(linears, rows, strict=True)]
        )
        axes.set_xlabel("step (unrolled depth)")
        axes.set_ylabel("linear (full rank)")
        axes.set_title(f"{init} initialisation", fontsize=10.5)
        for x, (here, after) in enumerate(zip(rows[0], rows[0][1:], strict=False)):
            if here.recursion != after.recursion:
                axes.axvline(x + 0.5, color="white", linewidth=1.6)
    figure.colorbar(image, ax=figure.axes, label="rank, as a part of the full rank", shrink=0.9)
    set_title(figure, f"{shortened(name)}: rank for {SHARE:.0%} of the residual's energy ({_plan(numbers)})")
    figure.savefig(out, format="png", dpi=150)


def _plan(numbers: WeightNumbers) -> str:
    return f"{numbers.sharing}, {numbers.layout} layers looped {numbers.recursions} times"
