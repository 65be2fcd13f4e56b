"""What tying takes away, for people: captured energy by rank, the rank that each step needs, tables and the page."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm import __version__
from fathomlm.cli.display import Rows, model_name, progress_bar
from fathomlm.lab.analyze.options import AnalyzeWeights
from fathomlm.lab.analyze.report import About, finish, render, write_report
from fathomlm.lab.analyze.weights import SHARES, WeightNumbers, bands, check_inits, measure, open_plain
from fathomlm.lab.common import amount
from fathomlm.lab.drawing import DASHES, LINES, figure_over_table, new_figure, plain_axes, save_figure, shortened

COLUMNS = 4
SHARE = 0.9
TICKS = 16


def write_weights(numbers: WeightNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw = {
        "energy.png": partial(draw_energy, numbers, about.name),
        "ranks.png": partial(draw_ranks, numbers, about.name),
    }
    page = partial(render, TEMPLATE, about, ranks=rank_table(numbers), kinds=kind_table(numbers))
    return write_report("weights", asdict(numbers), about, draw, page, out, force)


def rank_table(numbers: WeightNumbers) -> Rows:
    """What one rank on every linear would capture, and cost."""
    rows = [["rank on every linear", *(f"captured, {init}" for init in numbers.inits), "added", "parameters", "of the base"]]
    for row in numbers.ranks:
        captured = [f"{row.captured[init]:.1%}" for init in numbers.inits]
        size = [amount(row.added_parameters), amount(row.non_embedding_parameters), f"{row.relative_parameters:.2f}x"]
        rows.append([str(row.rank), *captured, *size])
    return rows


def kind_table(numbers: WeightNumbers) -> Rows:
    """For each linear the norm of what is lost, and the rank that the worst step needs for parts of its energy."""
    rows = [["linear", "init", "lost norm", *(f"rank for {share:.0%}" for share in SHARES), "full rank"]]
    for linear in numbers.linears:
        for init in numbers.inits:
            sums = numbers.sums(init, linear)
            ranks = [str(sums[f"rank_{round(100 * share)}"]) for share in SHARES]
            rows.append([linear, init, f"{sums['relative']:.2f}", *ranks, str(sums["full_rank"])])
    return rows


def draw_energy(numbers: WeightNumbers, name: str, out: Path) -> None:
    """A panel a linear: the mean over steps as a line, the least and the most as a band; the table under them."""
    columns = min(COLUMNS, len(numbers.linears))
    lines = math.ceil(len(numbers.linears) / columns)
    figure, grid = figure_over_table(3.7 * columns, [3.1] * lines, rank_table(numbers), columns=columns)
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
        plain_axes(axes, linear, "rank", "captured energy (part)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    title = f"{shortened(name)}: how much of what tying takes away a rank gives back ({_plan(numbers)})"
    save_figure(figure, title, out)


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
    save_figure(figure, f"{shortened(name)}: rank for {SHARE:.0%} of the residual's energy ({_plan(numbers)})", out)


def _plan(numbers: WeightNumbers) -> str:
    return f"{numbers.sharing}, {numbers.layout} layers looped {numbers.recursions} times"


def run(options: AnalyzeWeights) -> int:
    inits = check_inits(options.init)
    options.use_threads()
    base = open_plain(options.model)
    plan = options.plan.build_plan(base.architecture.layers)
    with progress_bar("spectra", unit="linears") as update:
        numbers = measure(base, plan, inits, on_linear=update)
    about = About(
        model=options.model,
        name=model_name(options.model),
        plan=f"{plan.layout} layers looped {plan.recursions} times ({plan.sharing})",
        dtype=str(base.dtype).removeprefix("torch."),
        device="cpu",
        data=[],
        version=__version__,
    )
    files = write_weights(numbers, about, options.directory, options.force)
    return finish(options, about, numbers.summary(), [rank_table(numbers), kind_table(numbers)], files)


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: what tying takes away{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: what rank do I need?</h1>
<p class="note">{{ about.model }} ({{ about.dtype }}), tied as {{ about.plan }}.</p>
<figure><img src="{{ images.energy }}" alt="Captured energy by rank for each kind of linear">
<figcaption>The residual of a step is the base layer in its place less the tied weight. A LoRA or DoRA that starts from its
SVD captures its largest singular values. A curve that rises early says that a small rank gives most back.</figcaption>
</figure>
{{ table(ranks) }}
<figure><img src="{{ images.ranks }}" alt="The rank that each linear of each step needs">
<figcaption>The rank for nine tenths of a residual's energy, by linear and step. 0 is a step that tying takes nothing from:
it starts as the base layer itself. White lines part the recursions.</figcaption></figure>
{{ table(kinds) }}
<dl>
<dt>energy</dt><dd>The sum of squared singular values.</dd>
<dt>lost norm</dt><dd>The residual's norm against that of the base layer's own weight, as a mean over the steps.</dd>
<dt>rank for</dt><dd>What the step that needs most needs.</dd>
<dt>added</dt><dd>Parameters of such a LoRA on every linear of every shared step. Norms and biases stay tied.</dd>
</dl>
<p class="note">Energy says how much of a matrix comes back, not how much of a model's quality: training moves what is
left.</p>
{% endblock %}
"""
