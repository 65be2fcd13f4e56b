"""Heat maps of lengths and cosines over the steps, recursions marked (thesis 4, appendix on key-value trends)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathomlm.lab.analyze.drawing import draw_table, new_figure, set_title, shortened
from fathomlm.lab.analyze.kv import Grid, KVNumbers, States
from fathomlm.lab.analyze.tables import kv_table

NAMES = {"hidden": "hidden states", "key": "keys (before rotation)", "value": "values"}
WIDE_RANGE = 20.0
"""From this ratio of the largest to the smallest length on, colours go by their logarithm."""
TICKS = 12
"""About as many steps are named along an axis."""


def draw_kv(numbers: KVNumbers, name: str, out: Path) -> None:
    """Lengths above, cosines below, the numbers under them."""
    table = kv_table(numbers)
    table_height = 0.27 * (len(table) + 1)
    figure = new_figure(14.4, 9.0 + table_height + 0.5)
    grid = figure.add_gridspec(3, 3, height_ratios=(4.4, 4.6, table_height))
    for column, (kind, states) in enumerate(numbers.states().items()):
        _draw_lengths(figure.add_subplot(grid[0, column]), NAMES[kind], states, numbers)
        _draw_cosines(figure.add_subplot(grid[1, column]), NAMES[kind], states, numbers)
    draw_table(figure.add_subplot(grid[2, :]), table, ["black"] * (len(table) - 1))
    of = f"{numbers.rows} row{'s' if numbers.rows > 1 else ''} of {numbers.context:,} tokens"
    set_title(figure, f"{shortened(name)}: hidden states, keys and values from step to step, {of}")
    figure.savefig(out, format="png", dpi=150)


def _draw_lengths(axes: Any, title: str, states: States, numbers: KVNumbers) -> None:
    from matplotlib.colors import LogNorm, Normalize

    of_steps = states.by_position[: len(numbers.running)]  # the final norm is of another size, and may leave the scale
    known = [value for row in of_steps for value in row if value is not None and value > 0]
    low, high = min(known, default=0.0), max(known, default=1.0)
    wide = low > 0 and high / low > WIDE_RANGE
    norm = (LogNorm if wide else Normalize)(low, high if high > low else low + 1)
    rest = [value for row in states.by_position for value in row if value is not None]
    extend = "min" if min(rest, default=low) < low else "max" if max(rest, default=high) > high else "neither"
    image = axes.imshow(_filled(states.by_position), aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=f"mean L2 norm{' (log scale)' if wide else ''}", shrink=0.9, extend=extend)
    axes.set_title(f"{title}: length", fontsize=10.5)
    axes.set_xlabel("position in the row (tokens)")
    places = range(0, len(numbers.buckets), max(1, len(numbers.buckets) // 4))
    axes.set_xticks([place - 0.5 for place in places], [f"{numbers.buckets[place]:,}" for place in places])
    _mark_steps(axes, states, numbers, both=False)


def _draw_cosines(axes: Any, title: str, states: States, numbers: KVNumbers) -> None:
    known = [value for row in states.cosine for value in row if value is not None]
    low = min(0.0, math.floor(10 * min(known, default=0.0)) / 10)
    image = axes.imshow(_filled(states.cosine), cmap="viridis", vmin=low, vmax=1.0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="mean cosine", shrink=0.9)
    axes.set_title(f"{title}: cosine between steps", fontsize=10.5)
    _mark_steps(axes, states, numbers, both=True)


def _mark_steps(axes: Any, states: States, numbers: KVNumbers, both: bool) -> None:
    """Names of steps, * at those that read another's entries, and a line where a recursion begins."""
    count = len(states.steps)
    axes.set_facecolor("0.8")
    every = max(1, -(-count // TICKS))
    places = list(range(0, count, every))
    if states.steps[-1].name == "norm":
        places = [place for place in places if place + every < count] + [count - 1]
    names = [f"{states.steps[place].name}{'*' if states.steps[place].reads is not None else ''}" for place in places]
    starred = any(step.reads is not None for step in states.steps)
    unit = "step (* reads an earlier one's)" if starred else "step"
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylabel(unit)
    if both:
        axes.set_xticks(places, names, fontsize=8, rotation=90 if count > TICKS else 0)
        axes.set_xlabel(unit)
    for border in _lines(numbers.borders, states):
        axes.axhline(border - 0.5, color="white", linewidth=1.2)
        if both:
            axes.axvline(border - 0.5, color="white", linewidth=1.2)


def _lines(borders: Sequence[int], states: States) -> list[int]:
    """The recursions' borders, and the one before the final norm's row."""
    return [*borders, *([len(states.steps) - 1] if states.steps[-1].name == "norm" else [])]


def _filled(grid: Grid) -> list[list[float]]:
    """matplotlib leaves out what is not a number."""
    return [[math.nan if value is None else value for value in row] for row in grid]
