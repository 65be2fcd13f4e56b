"""Hidden states, keys and values from step to step, for people: maps of their lengths and of how alike they are, a table and
the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm.cli.display import Rows, progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.kv import Grid, KVNumbers, StateMaps, measure
from fathomlm.lab.analyze.options import KeysAndValues
from fathomlm.lab.analyze.report import About, about_model, finish, render, write_report
from fathomlm.lab.common import optional
from fathomlm.lab.drawing import figure_over_table, save_figure, shortened
from fathomlm.lab.token_rows import LONGEST_ROW, find, read_rows, row_length, text_row

NAMES = {"hidden": "hidden states", "key": "keys (before rotation)", "value": "values"}
WIDE_RANGE = 20.0
"""From this ratio of the largest to the smallest length on, colors go by their logarithm."""
TICKS = 12
"""About as many steps are named along an axis."""


def write_kv(numbers: KVNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw = {"kv.png": partial(draw_kv, numbers, about.name)}
    return write_report("kv", asdict(numbers), about, draw, partial(kv_page, numbers, about), out, force)


def kv_page(numbers: KVNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    return render(TEMPLATE, about, pictures, numbers=numbers, summary=kv_table(numbers))


def kv_table(numbers: KVNumbers) -> Rows:
    """A row a kind; the final norm is no step."""
    rows = [["L2 norm", "first step", "last step", "least", "most", "cosine tied", "untied"]]
    for kind, states in numbers.states().items():
        lengths = states.magnitude[: len(numbers.running)]
        known = [length for length in lengths if length is not None]
        shown = [lengths[0], lengths[-1], min(known, default=None), max(known, default=None)]
        cosines = [optional(value, ".3f") for value in (states.tied, states.untied)]
        rows.append([kind, *(optional(value, ",.4g") for value in shown), *cosines])
    return rows


def draw_kv(numbers: KVNumbers, name: str, out: Path) -> None:
    """Lengths above, cosines below, the numbers under them."""
    figure, grid = figure_over_table(14.4, (4.4, 4.6), kv_table(numbers), columns=3)
    for column, (kind, states) in enumerate(numbers.states().items()):
        _draw_lengths(figure.add_subplot(grid[0, column]), NAMES[kind], states, numbers)
        _draw_cosines(figure.add_subplot(grid[1, column]), NAMES[kind], states, numbers)
    of = f"{numbers.rows} row{'s' if numbers.rows > 1 else ''} of {numbers.context:,} tokens"
    save_figure(figure, f"{shortened(name)}: hidden states, keys and values from step to step, {of}", out)


def _draw_lengths(axes: Any, title: str, states: StateMaps, numbers: KVNumbers) -> None:
    from matplotlib.colors import LogNorm, Normalize

    of_steps = states.by_position[: len(numbers.running)]  # the final norm is of another size, and may exit the scale
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


def _draw_cosines(axes: Any, title: str, states: StateMaps, numbers: KVNumbers) -> None:
    known = [value for row in states.cosine for value in row if value is not None]
    low = min(0.0, math.floor(10 * min(known, default=0.0)) / 10)
    image = axes.imshow(_filled(states.cosine), cmap="viridis", vmin=low, vmax=1.0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="mean cosine", shrink=0.9)
    axes.set_title(f"{title}: cosine between steps", fontsize=10.5)
    _mark_steps(axes, states, numbers, both=True)


def _mark_steps(axes: Any, states: StateMaps, numbers: KVNumbers, both: bool) -> None:
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
    last = [count - 1] if states.steps[-1].name == "norm" else []  # before the final norm's row
    for border in (*numbers.borders, *last):
        axes.axhline(border - 0.5, color="white", linewidth=1.2)
        if both:
            axes.axvline(border - 0.5, color="white", linewidth=1.2)


def _filled(grid: Grid) -> list[list[float]]:
    """matplotlib leaves out what is not a number."""
    return [[math.nan if value is None else value for value in row] for row in grid]


def run(options: KeysAndValues) -> int:
    if bool(options.data) == (options.text is not None):
        raise OptionError("give either --data FILE or --text TEXT")
    places = find(options.data) if options.data else []
    model = options.load()
    context = row_length(model, options.context, most=min(LONGEST_ROW, options.tokens))
    if options.text is None:
        count = max(1, options.tokens // context)
        rows = read_rows(places, model, context=context, rows=count, column=options.column)
    else:
        rows = text_row(model, options.text, most=min(context, options.tokens))
    with progress_bar("steps", unit="rows") as update:
        numbers = measure(model, rows, on_rows=update)
    about = about_model(options, model)
    files = write_kv(numbers, about, options.directory, options.force)
    return finish(options, about, numbers.summary(), [kv_table(numbers)], files)


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: keys and values{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: hidden states, keys and values from step to step</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }}
row{{ "s" if numbers.rows > 1 }} of {{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<figure><img src="{{ images.kv }}" alt="Heat maps of lengths by step and position, and of cosines between steps">
<figcaption>Above: how long the vectors are, at each step (from the top) and position (from the left). Below: how alike the
same token's vectors are at two steps; 1 is the same direction. White lines part the recursions; grey is a step that no token
ran.</figcaption></figure>
{{ table(summary) }}
<dl>
<dt>cosine tied, untied</dt>
<dd>The mean cosine of two steps that run the same layer, and of two that do not. Where the first is near 1, recursions could
share their keys and values at little cost.</dd>
<dt>*</dt><dd>A step that makes no keys and values and reads an earlier step's; its rows show those.</dd>
<dt>norm</dt><dd>What leaves the final norm, and goes to the head.</dd>
</dl>
{% if numbers.running | min < 1 %}
<p class="note">Tokens that the router stopped are left out of the steps that they did not run.</p>
{% endif %}
{% endblock %}
"""
