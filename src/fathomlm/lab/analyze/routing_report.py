"""What the routers of a model do, for people: tables, router scores and test-time scaling as pictures (thesis 4.6.2 and
4.6.3, their two figures), and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.resolve import architecture_of
from fathomlm.cli.display import Rows, label, progress_bar, visible
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.depth.routing import ROUTERS
from fathomlm.lab.analyze.depth_limits import DepthLimit
from fathomlm.lab.analyze.options import AnalyzeRouting
from fathomlm.lab.analyze.pictures import draw_text
from fathomlm.lab.analyze.report import About, about_model, finish, render, write_report
from fathomlm.lab.analyze.routing import RoutingNumbers, ShownToken, check_routed, measure
from fathomlm.lab.analyze.routing_meters import ScoreHistogram
from fathomlm.lab.common import optional
from fathomlm.lab.drawing import (
    DASHES,
    SELECTED,
    UNSELECTED,
    figure_over_table,
    plain_axes,
    save_figure,
    shortened,
)
from fathomlm.lab.token_rows import find, read_rows, row_length

ACROSS = 3
"""Panels side by side."""


def write_routing(numbers: RoutingNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw = {
        "scores.png": partial(draw_scores, numbers, about.name),
        "scaling.png": partial(draw_scaling, numbers, about.name),
        "text.png": partial(draw_text, numbers, about.name),
    }
    return write_report("routing", numbers.to_dict(), about, draw, partial(routing_page, numbers, about), out, force)


def routing_page(numbers: RoutingNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    """`pictures` are PNG files by name."""
    colours = depth_colours(len(numbers.capacity))
    return render(
        TEMPLATE,
        about,
        pictures,
        numbers=numbers,
        depths=[{"depth": depth, "colour": colour, "ink": ink(colour)} for depth, colour in enumerate(colours)],
        shares=numbers.depth_shares(),
        summary=routing_table(numbers),
        flops=flops_table(numbers),
        scores=score_table(numbers),
        scaling=scaling_table(numbers),
        gain=gain_table(numbers),
        worth=worth_table(numbers),
        texts=[[_token(token, numbers.router) for token in sample] for sample in numbers.samples],
        label=label,
    )


def _token(token: ShownToken, router: str) -> dict[str, Any]:
    """A token of the colored text, and its tooltip."""
    what = "recursion" if ROUTERS[router].picks_tokens else "depth"
    listed = [
        f"{what} {place}: {'not reached' if score is None else f'{score:.3f}'}"
        for place, score in enumerate(token.scores, start=1)
    ]
    note = f"depth {token.depth}; token {token.token}; router scores: {', '.join(listed)}"
    return {"text": visible(token.text), "depth": token.depth, "note": note}


def routing_table(numbers: RoutingNumbers) -> Rows:
    """The metrics of both passes; token-choice has one."""
    top_k, causal = numbers.top_k or {}, numbers.causal
    R = len(numbers.capacity)
    rows = [["", "top-k", "causal"]]
    rows.append(["loss (nats per token)", optional(numbers.top_k_loss, ".4f"), f"{numbers.causal_loss:.4f}"])
    formats = {"mean_depth": ("mean depth", ".2f")}
    formats |= {f"load_{depth}": (f"tokens at depth {depth}", ".1%") for depth in range(R + 1)}
    formats |= {"sampling_accuracy": ("sampling accuracy", ".1%"), "dead_tokens": ("dead token ratio", ".1%")}
    formats |= {"max_violation": ("MaxVio", ".3f"), "entropy": (f"entropy (at most {math.log(R):.3f})", ".3f")}
    for name, (title, form) in formats.items():
        if name in top_k or name in causal:
            rows.append([title, optional(top_k.get(name), form), optional(causal.get(name), form)])
    return rows if numbers.top_k is not None else [[row[0], row[2]] for row in rows]


def flops_table(numbers: RoutingNumbers) -> Rows:
    """Forward FLOPs, and what part of the unrouted plan's they are."""
    flops = numbers.flops
    named = (("by the capacities", flops.nominal), ("as the text was run", flops.actual), ("unrouted", flops.unrouted))
    rows = [[name, f"{value:,}", f"{value / flops.unrouted:.1%}"] for name, value in named]
    return [["forward FLOPs", "per token", "of unrouted"], *rows]


def score_table(numbers: RoutingNumbers) -> Rows:
    """A row a recursion (expert) or a depth (token)."""
    expert = ROUTERS[numbers.router].picks_tokens
    rows = [["recursion" if expert else "depth", "tokens", "selected", "mean score", "not selected", "mean score"]]
    for histogram in numbers.histograms:
        kept, left = sum(histogram.selected), sum(histogram.unselected)
        total = max(kept + left, 1)
        means = [optional(mean, ".3f") for mean in (histogram.selected_mean, histogram.unselected_mean)]
        shares = f"{kept / total:.1%}", f"{left / total:.1%}"
        rows.append([str(histogram.recursion), f"{kept + left:,}", shares[0], means[0], shares[1], means[1]])
    return rows


def scaling_table(numbers: RoutingNumbers) -> Rows:
    """A row a maximum depth."""
    rows = [["max. depth", "loss (nats)", "log-likelihood of a row", "mean depth", "FLOPs per token", "of unrouted"]]
    rows += [
        [
            str(limit.max_depth),
            f"{limit.loss:.4f}",
            f"{limit.log_likelihood[-1]:,.1f}",
            f"{limit.mean_depth:.2f}",
            f"{limit.flops_per_token:,}",
            f"{limit.flops_per_token / numbers.flops.unrouted:.1%}",
        ]
        for limit in numbers.scaling
    ]
    return rows


def gain_table(numbers: RoutingNumbers) -> Rows:
    """A row for the tokens of each depth: what recursions gained them."""
    rows = [["routed to depth", "tokens", "loss, one recursion", "own depth", "gain", "every recursion", "gain"]]
    for own in numbers.gain.by_depth:
        losses = [f"{value:.4f}" for value in (own.one_loss, own.loss, own.gain, own.full_loss, own.full_gain)]
        rows.append([str(own.depth), f"{own.share:.1%}", *losses])
    return rows


def worth_table(numbers: RoutingNumbers) -> Rows:
    """What it is worth to choose who goes deep, at equal cost."""
    gain = numbers.gain
    error = "" if gain.routing_gain_error is None else f" ± {gain.routing_gain_error:.4f}"
    return [
        ["at the same mean depth", "loss (nats)"],
        ["depths as routed", f"{gain.loss:.4f}"],
        ["the same depths, shuffled in each row", f"{gain.shuffled_loss:.4f}"],
        ["what routing gains (± standard error over rows)", f"{gain.routing_gain:.4f}{error}"],
        ["correlation of depth and what depth would gain", optional(gain.correlation, ".3f")],
    ]


def draw_scores(numbers: RoutingNumbers, name: str, out: Path) -> None:
    """A panel for each recursion (expert) or depth (token), and the numbers under them."""
    histograms = numbers.histograms
    across = min(ACROSS, len(histograms))
    down = -(-len(histograms) // across)
    figure, grid = figure_over_table(4.4 * across if across > 1 else 6.4, [3.2] * down, score_table(numbers), columns=across)
    for at, histogram in enumerate(histograms):
        _draw_histogram(figure.add_subplot(grid[at // across, at % across]), histogram, numbers)
    what = "top-k selection" if ROUTERS[numbers.router].picks_tokens else "the depth that tokens chose"
    save_figure(figure, f"{shortened(name)}: router scores by {what}", out)


def draw_scaling(numbers: RoutingNumbers, name: str, out: Path) -> None:
    """Loss by maximum depth, cumulative log-likelihood by position, what depth adds to it, and the numbers under them."""
    from matplotlib.patheffects import withStroke

    limits = numbers.scaling
    scale = depth_colours(len(numbers.capacity))
    colours = [scale[limit.max_depth] for limit in limits]
    figure, grid = figure_over_table(13.2, [3.8], scaling_table(numbers), columns=3)
    losses, totals, gains = (figure.add_subplot(grid[0, column]) for column in range(3))
    _draw_losses(losses, limits, colours)
    first = limits[0].log_likelihood
    for at, (limit, colour) in enumerate(zip(limits, colours, strict=True)):
        style = {"color": colour, "linestyle": DASHES[at % len(DASHES)], "label": f"at most {limit.max_depth}"}
        style["path_effects"] = [withStroke(linewidth=2.5, foreground="#666666")]  # light ones would be lost on white
        places = range(1, len(first) + 1)
        totals.plot(places, limit.log_likelihood, **style)
        gains.plot(places, [value - base for value, base in zip(limit.log_likelihood, first, strict=True)], **style)
    position = "position in the row (tokens)"
    plain_axes(totals, "log-likelihood up to a position", position, "sum of log p (nats)")
    plain_axes(gains, "what depth adds to it", position, "more than at depth 1 (nats)")
    for axes in (totals, gains):
        axes.legend(title="recursions", fontsize=8, title_fontsize=8, framealpha=0.8)
    save_figure(figure, f"{shortened(name)}: test-time scaling, {numbers.rows} rows of {numbers.context:,} tokens", out)


def _draw_histogram(axes: Any, histogram: ScoreHistogram, numbers: RoutingNumbers) -> None:
    total = max(sum(histogram.selected) + sum(histogram.unselected), 1)
    width = histogram.edges[1] - histogram.edges[0]
    style = {"align": "edge", "alpha": 0.75, "edgecolor": "white", "linewidth": 0.3}
    for counts, colour, hatch, name in (
        (histogram.selected, SELECTED, None, "selected"),
        (histogram.unselected, UNSELECTED, "////", "not selected"),
    ):
        if sum(counts):
            heights = [100 * count / total for count in counts]
            axes.bar(histogram.edges[:-1], heights, width, color=colour, hatch=hatch, label=name, **style)
    if numbers.threshold is not None and not histogram.takes_all:
        axes.axvline(numbers.threshold, color="black", linewidth=1.0, linestyle="--", label="causal rule")
    capacity = numbers.capacity[histogram.recursion - 1]
    expert = ROUTERS[numbers.router].picks_tokens
    note = "takes every token" if histogram.takes_all else f"keeps {100 * capacity:.3g}% of a row"
    title = f"recursion {histogram.recursion}: {note}" if expert else f"depth {histogram.recursion}"
    plain_axes(axes, title, "router score", f"fraction of the tokens{' scored' if expert else ''} (%)")
    low, high = histogram.edges[0], histogram.edges[-1]
    axes.set_xlim(low, high)
    axes.set_xticks([low + (high - low) * i / 4 for i in range(5)])
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
    title = f"loss by depth{'' if low == 0 else ' (axis does not begin at 0)'}"
    plain_axes(axes, title, "recursions at most", "next-token loss (nats per token)")
    axes.grid(visible=False, axis="x")


def run(options: AnalyzeRouting) -> int:
    places = find(options.data)
    check_routed(architecture_of(options.model)[1], options.model)
    model = options.load()
    context = row_length(model, options.context)
    rows = read_rows(places, model, context=context, rows=options.rows, column=options.column)
    with progress_bar("routing", unit="rows") as update:
        numbers = measure(model, rows, samples=options.samples, on_rows=update)
    about = about_model(options, model)
    files = write_routing(numbers, about, options.directory, options.force)
    limits = [row[:2] + row[3:4] for row in scaling_table(numbers)]
    tables = [routing_table(numbers), flops_table(numbers), limits, gain_table(numbers), worth_table(numbers)]
    return finish(options, about, numbers.summary(), tables, files)


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: routing{% endblock %}
{% block style %}
{% for each in depths %}
.d{{ each.depth }} { background: {{ each.colour }}; color: {{ each.ink }}; }
{% endfor %}
{% endblock %}
{% block body %}
{% set expert = numbers.top_k is not none %}
<h1>{{ about.name }}: how its tokens are routed</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }} rows of
{{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<div class="side">
{% from "parts" import table %}
{{ table(summary) }}
{{ table(flops) }}
</div>
<dl>
{% if expert %}
<dt>top-k and causal</dt>
<dd>In training each recursion keeps the best tokens of a row, which it must see whole. In use a score decides on each token
as it comes. The causal loss is {{ "%+.4f" | format(numbers.loss_difference) }} nats against the top-k loss.</dd>
<dt>sampling accuracy</dt><dd>How often the causal rule agrees with the top-k selection.</dd>
<dt>dead token ratio</dt><dd>The part of a row's positions that the last recursion took in none of the rows.</dd>
{% else %}
<dt>MaxVio</dt><dd>How far the fullest depth lies above an even share of the tokens; 0 is even.</dd>
<dt>entropy</dt><dd>Of the router's mean scores over the depths, in nats; at its most, all depths are alike to it.</dd>
{% endif %}
<dt>forward FLOPs</dt>
<dd>Counted as the thesis counts them, without embeddings and head. Unrouted is the same model with every token at full
depth.</dd>
</dl>

<h2>Text by depth</h2>
<p class="note">Each token stands on the color of the number of recursions that ran at its place, to predict the token
behind it. Point at one to see its router scores. · is a token that ends within a character, ↵ a line end. The legend gives
the part of all tokens at each depth.</p>
<p class="legend">
{% for depth, share in shares.items() %}
<span class="d{{ depth }}">{{ depth }}</span>{{ "%.1f" | format(100 * share) }}%&emsp;
{% endfor %}
</p>
{% for text in texts %}
<pre class="text">
{%- for token in text -%}
<span class="d{{ token.depth }}" title="{{ token.note }}">{{ token.text }}</span>
{%- endfor -%}
</pre>
{% endfor %}

<h2>Router scores</h2>
<figure><img src="{{ images.scores }}" alt="Histograms of router scores, selected and unselected tokens apart">
<figcaption>
{% if expert %}
The scores by which the causal rule decides, split by what the top-k selection did. Where the two do not overlap and the
dashed line runs between them, causal decisions are those of training.
{% else %}
The score that tokens gave each depth, split by whether they chose it.
{% endif %}
</figcaption></figure>
{{ table(scores) }}

<h2>Test-time scaling</h2>
<figure><img src="{{ images.scaling }}" alt="Loss by maximum depth, and log-likelihood by position for each maximum depth">
<figcaption>The same text with fewer recursions allowed. A curve that rises on the right says that depth pays, and from which
position on.</figcaption></figure>
{{ table(scaling) }}

<h2>Is depth spent where it lowers the loss?</h2>
<p class="note">The tokens of each depth with one recursion for all tokens, at the depths that the routers chose, and with
every recursion for all. Beside it, the same depths dealt out at random within each row: the difference at equal cost is what
the choice is worth.</p>
<div class="side">
{{ table(gain) }}
{{ table(worth) }}
</div>

<h2>Which tokens go deep</h2>
<p class="note">Mean depth at the tokens that occur at least {{ numbers.seen }} times.
{% if not numbers.deepest %}
No token does: give more text.
{% endif %}
</p>
<div class="side">
{% for title, tokens in (("deepest", numbers.deepest), ("shallowest", numbers.shallowest)) if tokens %}
<table>
<thead><tr><th scope="col">{{ title }}</th><th scope="col">mean depth</th><th scope="col">seen</th></tr></thead>
<tbody>
{% for each in tokens %}
<tr><th scope="row" class="token">{{ label(each.text) }}</th><td>{{ "%.2f" | format(each.mean_depth) }}</td>
<td>{{ "{:,}".format(each.count) }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
</div>
{% endblock %}
"""
