"""What exits would do, for people: tables, confidences by agreement, every layer against the last, where decoding spends
its time, and the page."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.resolve import plan_of
from fathomlm.cli.common import read_documents
from fathomlm.cli.decoding import lift_exit_vocab
from fathomlm.cli.display import Rows, progress_bar
from fathomlm.decode.prompts import encode_prompt
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.breakdown import PARTS, TimeBreakdown, measure_times
from fathomlm.lab.analyze.exits import DecodedSource, ExitNumbers, check_exits, complete, measure
from fathomlm.lab.analyze.options import LONGEST_EXIT_ROW, Exits
from fathomlm.lab.analyze.pictures import draw_fit
from fathomlm.lab.analyze.report import About, Draw, about_model, finish, render, write_report
from fathomlm.lab.common import optional
from fathomlm.lab.drawing import (
    LINES,
    SELECTED,
    UNSELECTED,
    figure_over_table,
    new_figure,
    plain_axes,
    save_figure,
    shortened,
)
from fathomlm.lab.token_rows import TokenRows, find, read_rows, row_length
from fathomlm.model.seq2seq import FathomForSeq2SeqLM

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
LONGEST_SOURCE = 512
"""Tokens of a document that an encoder reads, as `fathomlm calibrate` has it."""


def write_exits(numbers: ExitNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw: dict[str, Draw] = {
        "layers.png": partial(draw_layers, numbers, about.name),
        "confidence.png": partial(draw_confidence, numbers, about.name),
    }
    tables: dict[str, Any] = {"layers": layer_table(numbers), "fits": fit_table(numbers), "times": None}
    if numbers.breakdown is not None:
        draw["times.png"] = partial(draw_times, numbers.breakdown, about.name)
        tables["times"] = time_table(numbers.breakdown)
    page = partial(render, TEMPLATE, about, numbers=numbers, **tables)
    return write_report("exits", numbers.to_dict(), about, draw, page, out, force)


def layer_table(numbers: ExitNumbers) -> Rows:
    """agree: with the last layer; right: the token that follows; sure: mean confidence; agreed: cosine where they agree."""
    rows = [["layer", "agree", "right", "loss", "sure", "cosine", "agreed", "first", "settled"]]
    for each in numbers.layers:
        shares = [f"{each.agreement:.1%}", f"{each.accuracy:.1%}"]
        means = [f"{each.loss:.4f}", f"{each.confidence:.3f}", f"{each.cosine:.3f}", optional(each.cosine_agreed, ".3f")]
        rows.append([str(each.layer), *shares, *means, f"{each.first:.1%}", f"{each.settled:.1%}"])
    return rows


def fit_table(numbers: ExitNumbers) -> Rows:
    """A row an exit: the densities, the threshold, and what would come of it."""
    rows = [["exit", "agree", "Beta", "not", "Beta", "threshold", "exit early", "and agree"]]
    for fit in numbers.exits:
        cells = []
        for samples in (fit.estimator.agree, fit.estimator.disagree):
            beta = samples.fit()
            cells += [f"{samples.count:,}", f"{beta.alpha:.2g}, {beta.beta:.2g}" if samples.count else "-"]
        early = [f"{fit.early:.1%}", optional(fit.agreed, ".1%")]
        rows.append([f"layer {fit.layer}", *cells, f"{fit.estimator.threshold:.3f}", *early])
    return rows


def time_table(breakdown: TimeBreakdown) -> Rows:
    """A row a part, in per cent of each mode's own time, under its time against full depth."""
    modes = breakdown.modes
    rows = [[part, *(f"{mode.shares[part]:.1%}" for mode in modes)] for part in PARTS]
    whole = ["time against full depth", *(f"{mode.relative:.0%}" for mode in modes)]
    early = ["tokens that exited early", *(f"{mode.exit_rate:.0%}" for mode in modes)]
    return [["part of the time", *(mode.name for mode in modes)], *rows, whole, early]


def draw_confidence(numbers: ExitNumbers, name: str, out: Path) -> None:
    """A panel for each exit, the numbers under them."""
    lines = math.ceil(len(numbers.exits) / COLUMNS)
    columns = min(COLUMNS, len(numbers.exits))
    width = 7.4 * columns if columns > 1 else 9.0
    figure, grid = figure_over_table(width, [4.8] * lines, fit_table(numbers), columns=columns)
    for place, fit in enumerate(numbers.exits):
        draw_fit(figure.add_subplot(grid[divmod(place, columns)]), fit.estimator, f"exit after layer {fit.layer}")
    what = f"confidence '{numbers.confidence}' by agreement with the last layer"
    save_figure(figure, f"{shortened(name)}: {what}, {numbers.rows * numbers.context:,} tokens", out)


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
    _name_panel(agreement, "agreement with the last layer", "part of the tokens")
    agreement.set_ylim(0, 1.02)
    line(loss, "loss", LINES[0], "o", "every token exits there")
    _name_panel(loss, "static exiting (observation 2)", "loss (nats per token)")
    line(cosine, "cosine", LINES[0], "o", "all tokens")
    line(cosine, "cosine_agreed", LINES[1], "s", "tokens that already choose the last layer's", "--")
    cosine.axhline(numbers.oracle_cosine, color="0.35", linestyle=":", label=f"oracle's exits, {numbers.oracle_cosine:.3f}")
    _name_panel(cosine, "state against the last layer's (observation 1)", "mean cosine")
    width = 0.42
    for shift, field, colour, hatch, label in (
        (-width / 2, "first", SELECTED, None, f"first that agrees (oracle), mean {numbers.oracle_layer:.2f}"),
        (width / 2, "settled", UNSELECTED, "////", f"agrees from there on, mean {numbers.settled_layer:.2f}"),
    ):
        heights = [getattr(each, field) for each in numbers.layers]
        oracle.bar(
            [layer + shift for layer in layers], heights, width, color=colour, hatch=hatch, edgecolor="white", label=label
        )
    _name_panel(oracle, "how early a token could exit", "part of the tokens")
    for axes in panels:
        _mark_recursions(axes, numbers)
        axes.legend(fontsize=8, framealpha=0.85)
    save_figure(figure, f"{shortened(name)}: every layer against the last, {numbers.rows * numbers.context:,} tokens", out)


def _name_panel(axes: Any, title: str, unit: str) -> None:
    plain_axes(axes, title, "layer", unit)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _mark_recursions(axes: Any, numbers: ExitNumbers) -> None:
    """A line behind the last layer of each pass through a shared block."""
    pairs = zip(numbers.layers, numbers.layers[1:], strict=False)
    for place, (here, after) in enumerate((a, b) for a, b in pairs if a.recursion != b.recursion):
        label = "recursions begin and end" if place == 0 else None
        axes.axvline((here.layer + after.layer) / 2, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), label=label)


def draw_times(breakdown: TimeBreakdown, name: str, out: Path) -> None:
    """A bar for each way of decoding, as long as its time against full depth."""
    figure, grid = figure_over_table(10.4, [3.9], time_table(breakdown))
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
    axes.set_yticks(places, [f"{mode.name}\n({mode.exit_rate:.0%} exited early)" for mode in breakdown.modes])
    axes.invert_yaxis()
    axes.axvline(100, color="0.35", linestyle=":", linewidth=1.0)
    plain_axes(axes, x="time per token (% of full depth)")
    axes.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(PARTS), frameon=False)
    title = f"{shortened(name)}: where decoding spends its time, threshold {breakdown.threshold:.3f}"
    save_figure(figure, title, out)


def run(options: Exits) -> int:
    places = find(options.data)
    exits = check_exits(plan_of(options.model, options.exits), options.exit_layers, options.confidence)
    model = options.load_any(exits=options.exits, any_base=options.any_base)
    lift_exit_vocab(model)
    rows: TokenRows | list[DecodedSource]
    if isinstance(model, FathomForSeq2SeqLM):
        rows = _completions(options, model)
        prompts = [each.source for each in rows[: options.prompts]]
    else:
        context = row_length(model, options.context, most=min(LONGEST_EXIT_ROW, options.tokens))
        rows = read_rows(places, model, context=context, rows=max(1, options.tokens // context), column=options.column)
        room = model.architecture.context - options.max_new_tokens
        prompts = _prompts(rows.tokens_NT.tolist(), options.prompts, room) if options.prompts else []
    with progress_bar("layers", unit="rows") as update:
        numbers = measure(model, rows, layers=exits, confidence=options.confidence, rule=options.rule, on_rows=update)
    tables = [layer_table(numbers), fit_table(numbers)]
    if prompts:
        threshold = numbers.exits[0].estimator.threshold
        with progress_bar("times", unit="prompts") as update:
            times = measure_times(
                model, prompts, exits=exits, threshold=threshold, new_tokens=options.max_new_tokens, on_text=update
            )
        numbers = dataclasses.replace(numbers, breakdown=times)
        tables.append(time_table(times))
    about = about_model(options, model)
    if options.exits is not None:
        about = dataclasses.replace(about, plan=f"{about.plan}, exits of {options.exits}")
    return finish(options, about, numbers.summary(), tables, write_exits(numbers, about, options.directory, options.force))


def _completions(options: Exits, model: FathomForSeq2SeqLM) -> list[DecodedSource]:
    """Of as many documents as about `--tokens` new tokens take."""
    documents = read_documents(options.data, options.column, max(1, options.tokens // options.max_new_tokens))
    sources = [encode_prompt(model, text)[: options.context or LONGEST_SOURCE] for text in documents]
    with progress_bar("completions", unit="documents") as update:
        return complete(model, sources, options.max_new_tokens, on_text=update)


def _prompts(rows: list[list[int]], many: int, room: int, length: int = 32) -> list[list[int]]:
    """Beginnings of rows, or of their parts where there are fewer rows than prompts."""
    if room < 1:
        raise OptionError("--max-new-tokens leaves no room for a prompt in the model's context")
    size = min(length, room, len(rows[0]))
    pieces = [row[at : at + size] for row in rows for at in range(0, len(row) - size + 1, size)]
    step = max(1, len(pieces) // many)
    return pieces[::step][:many]


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: exits{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: what every layer would predict</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }}
row{{ "s" if numbers.rows > 1 }} of {{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<figure><img src="{{ images.layers }}" alt="Agreement, loss, cosine and the oracle's exits by layer">
<figcaption>Each layer as if every token exited there, through the final norm, the head and what the exit adds to them.
</figcaption></figure>
<dl>
<dt>agree, right</dt>
<dd>How often a layer's most likely token is the last layer's, and how often it is the token that follows.</dd>
<dt>loss, sure</dt><dd>The next-token loss in nats, and the mean confidence.</dd>
<dt>cosine, agreed</dt>
<dd>Of a token's state with the last layer's, before the final norm; of all tokens, and of those that agree. Where it is
low although the layer already chooses the last layer's token, a copied state is a poor stand-in for what deeper layers
would have made of it.</dd>
<dt>first, settled</dt>
<dd>The layer at which an oracle would exit: the first that agrees with the last one. Settled is the layer from which on
none disagrees.</dd>
</dl>
{{ table(layers) }}

<h2>Confidence by agreement</h2>
<figure><img src="{{ images.confidence }}" alt="Histograms of confidences by agreement, with the fitted Beta densities">
<figcaption>The tokens of this text, run once and not generated. The threshold is where agreement becomes likely enough; a
token whose confidence exceeds it would exit. <code>fathomlm calibrate</code> learns it from the model's own completions.
</figcaption></figure>
{{ table(fits) }}

{% if times %}
<h2>Where the time goes</h2>
<figure><img src="{{ images.times }}" alt="Time per token by part, for three ways of decoding">
<figcaption>One text at a time, on this machine: read shares, not milliseconds. State copying asks every layer from the first
exit on; parallel decoding asks the first exit only, and runs the layers behind it later. Both use the plain code that
everything else is held against, not the engine. Hatched parts are what early exits pay for: scores at exits, and keys and
values for skipped layers.</figcaption></figure>
{{ table(times) }}
{% endif %}
{% endblock %}
"""
