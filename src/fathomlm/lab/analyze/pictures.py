"""Two pictures of more than a panel.

Where a confidence threshold comes from: the samples, what was fitted to them, how many tokens are wrong at each
threshold, the value over time (thesis 2.5.3).

Text with each token on the color of its depth, as a picture (thesis 4, table "Visualization of the recursion depth").
A fixed-width font makes the layout exact: a letter is a cell, and a line is cut where its cells are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.display import Rows, visible
from fathomlm.decode.threshold import ThresholdEstimator
from fathomlm.decode.threshold_samples import BINS, STEPS
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.lab.analyze.routing import RoutingNumbers, ShownToken
from fathomlm.lab.drawing import LINES, SELECTED, UNSELECTED, figure_over_table, plain_axes, save_figure, shortened

POINTS = 500
"""Of a curve."""
MARKED = 40
"""Up to so many refits have a mark each."""
POSTERIOR = LINES[2]
WRONG = LINES[1]
DARKER = {SELECTED: "#004B76", UNSELECTED: "#8F6200"}
"""Curves over the bars of the same class."""
LEGEND: dict[str, Any] = {"fontsize": 8, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 3, "frameon": False}
"""Under the panel, where it hides nothing."""


def draw_threshold(estimator: ThresholdEstimator, path: Path, name: str = "") -> None:
    """Confidences by class with their fit, wrong tokens by threshold and the threshold after each refit beside them, the
    numbers under them; a PNG. The thresholds of both rules are marked, whichever is in force.

    `name` begins the title: the model, or whose requests these are.
    """
    colours = [DARKER[SELECTED], DARKER[UNSELECTED]]
    figure, grid = figure_over_table(17.6, [4.4], _table(estimator), colours, columns=3, width_ratios=(3, 2.2, 1.8))
    draw_fit(figure.add_subplot(grid[0, 0]), estimator)
    _draw_risk(figure.add_subplot(grid[0, 1]), estimator)
    _draw_history(figure.add_subplot(grid[0, 2]), estimator)
    ended = f"{estimator.sequences:,} sequence{'' if estimator.sequences == 1 else 's'}"
    last = estimator.history[-1].sequence if estimator.history else 0
    state = "still calibrating" if estimator.calibrating else f"the first {last:,} calibrated"
    title = f"confidence threshold {estimator.threshold:.3f} (rule {estimator.options.rule}) after {ended}, {state}"
    save_figure(figure, f"{shortened(name)}: {title}" if name else title, path)


def draw_fit(axes: Any, estimator: ThresholdEstimator, title: str = "confidence by agreement, and the fit") -> None:
    """The posterior has an axis of its own, on the right. Densities may be infinite at the ends: bars set the height."""
    places = [at / POINTS for at in range(POINTS + 1)]
    highest = 0.0
    for samples, agreed, colour, hatch, label in (
        (estimator.agree, True, SELECTED, None, "deep model agrees"),
        (estimator.disagree, False, UNSELECTED, "////", "deep model disagrees"),
    ):
        if not samples.count:
            continue
        heights = [count * BINS / samples.count for count in samples.bins]
        edges = [at / BINS for at in range(BINS)]
        style = {"color": colour, "alpha": 0.55, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
        axes.bar(edges, heights, 1 / BINS, align="edge", label=f"{label} (tokens)", **style)
        dash = "-" if agreed else "--"
        curve = [estimator.density(agreed, c) for c in places]
        axes.plot(places, curve, color=DARKER[colour], linestyle=dash, linewidth=1.8, label=f"{label} (Beta)")
        highest = max(highest, *heights)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * highest or 1)
    plain_axes(axes, title, "confidence of the shallow model", "density (each class has area 1)")
    right = axes.twinx()
    right.set_ylim(0, 1.1)
    right.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    right.set_ylabel("probability of agreement", color=POSTERIOR)
    right.tick_params(axis="y", colors=POSTERIOR)
    right.spines[["top", "left"]].set_visible(False)
    if estimator.agree.count and estimator.disagree.count:
        curve = [estimator.posterior(c) for c in places]
        right.plot(places, curve, color=POSTERIOR, linestyle="-.", linewidth=1.8, label="posterior of agreement")
    condition = estimator.options.condition
    right.axhline(condition, color=POSTERIOR, linewidth=0.9, linestyle=":", label=f"condition {condition:g}")
    _mark(right, estimator)
    if not highest:
        axes.text(0.5, 0.6, "no samples yet", transform=axes.transAxes, ha="center", color="0.45")
    handles, labels = (
        ours + theirs
        for ours, theirs in zip(axes.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)
    )
    axes.legend(handles, labels, **LEGEND)


def thresholds(estimator: ThresholdEstimator) -> dict[str, float]:
    """By rule: the one in force first, and the other of the two that there is a choice between."""
    own = estimator.options.rule
    other = "thesis" if own == "risk" else "risk"
    return {own: estimator.threshold, other: estimator.by(other)}


def _mark(axes: Any, estimator: ThresholdEstimator) -> None:
    for (rule, threshold), dash in zip(thresholds(estimator).items(), ("-", "--"), strict=True):
        axes.axvline(threshold, color="black", ls=dash, lw=1.4, label=f"threshold {threshold:.3f} ({rule})", clip_on=False)


def _draw_risk(axes: Any, estimator: ThresholdEstimator) -> None:
    """The share of wrong tokens at each threshold, and what it stays below; tokens that exit on an axis of their own."""
    texts, options = estimator.texts, estimator.options
    places = [at / STEPS for at in range(STEPS)]
    exits = axes.twinx()
    exits.set_ylim(0, 1.02)
    exits.set_ylabel("share of tokens that exit", color=POSTERIOR)
    exits.tick_params(axis="y", colors=POSTERIOR)
    exits.spines[["top", "left"]].set_visible(False)
    if texts.count:
        wrong, bounds = [texts.share(at) for at in range(STEPS)], [texts.bound(at, options.level) for at in range(STEPS)]
        axes.plot(places, wrong, color=WRONG, linewidth=1.8, label="wrong tokens")
        axes.plot(places, bounds, color=WRONG, linewidth=1.2, ls="--", label=f"bound, level {options.level:g}")
        exits.plot(places, [texts.exiting(at) for at in range(STEPS)], color=POSTERIOR, linestyle="-.", label="exit")
    else:
        axes.text(0.5, 0.6, "no sequences yet", transform=axes.transAxes, ha="center", color="0.45")
    axes.axhline(options.risk, color=WRONG, linewidth=0.9, linestyle=":", label=f"risk {options.risk:g}")
    _mark(axes, estimator)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, min(1.0, 8 * options.risk))
    plain_axes(axes, "tokens that exit with another choice", "threshold", "share of all tokens")
    axes.legend(**{**LEGEND, "ncols": 2})


def _draw_history(axes: Any, estimator: ThresholdEstimator) -> None:
    """Up to the last refit. The initial value stands at 0, unless the first refits are no longer known."""
    ended = [refit.sequence for refit in estimator.history]
    values = [refit.threshold for refit in estimator.history]
    if not ended or ended[0] == 1:
        ended, values = [0, *ended], [estimator.options.start, *values]
    mark = {"marker": "o", "markersize": 3.5, "clip_on": False} if len(ended) <= MARKED else {}
    axes.plot(ended, values, color="black", linewidth=1.4, drawstyle="steps-post", label="in force", zorder=3, **mark)
    axes.axhline(estimator.options.start, color="0.45", linewidth=1.0, linestyle=":", label="initial value")
    axes.set_ylim(0, 1.1)
    axes.set_xlim(ended[0], max(ended[-1], ended[0] + 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    plain_axes(axes, "threshold after each refit", "sequences ended", "threshold (confidence)")
    axes.legend(**LEGEND)


def _table(estimator: ThresholdEstimator) -> Rows:
    """A row for each class: its samples, their moments, and the Beta that has the same."""
    marks = thresholds(estimator)
    names = [f"threshold ({rule})" for rule in marks]
    rows = [["the deep model", "tokens", "mean confidence", "standard deviation", "alpha", "beta", "condition", *names]]
    for name, samples in (("agrees", estimator.agree), ("disagrees", estimator.disagree)):
        numbers = ["-"] * 4
        if samples.count:
            beta = samples.fit()
            numbers = [f"{samples.mean:.3f}", f"{samples.variance**0.5:.3f}", f"{beta.alpha:.4g}", f"{beta.beta:.4g}"]
        rows.append([name, f"{samples.count:,}", *numbers, "", "", ""])
    rows[1][-3:] = [f"{estimator.options.condition:g}", *(f"{threshold:.3f}" for threshold in marks.values())]
    return rows


COLUMNS = 100
LETTER_POINTS = 9.0
"""The size of letters."""
LEAD = 1.55 * LETTER_POINTS
"""From line to line."""
MARGIN = 14.0
TITLE = 34.0
"""Points above the legend."""
PER_LINE = 8
"""Entries in a line of the legend."""
UNKNOWN = "▯"
"""For letters that the font does not have."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Letters of one token within one line."""

    line: int
    column: int
    text: str
    depth: int


def lay(tokens: Sequence[ShownToken], columns: int = COLUMNS) -> list[TextSpan]:
    """Where each token's letters stand."""
    spans: list[TextSpan] = []
    line = column = 0
    for token in tokens:
        for at, part in enumerate(visible(token.text).split("\n")):
            if at:
                line, column = line + 1, 0
            while part:
                if column == columns:
                    line, column = line + 1, 0
                piece, part = part[: columns - column], part[columns - column :]
                spans.append(TextSpan(line, column, piece, token.depth))
                column += len(piece)
    return spans


def draw_text(numbers: RoutingNumbers, name: str, out: Path) -> None:
    """All samples below each other, under a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = FontProperties(family="DejaVu Sans Mono", size=LETTER_POINTS)
    known = frozenset(get_font(findfont(font)).get_charmap())
    cell = LETTER_POINTS * 0.602
    blocks = [lay(sample) for sample in numbers.samples]
    heights = [1 + max((span.line for span in block), default=0) for block in blocks]
    width = 2 * MARGIN + COLUMNS * cell
    shares = numbers.depth_shares()
    legend = -(-len(shares) // PER_LINE)
    height = TITLE + LEAD * (legend + 1 + sum(heights) + len(blocks) - 1) + MARGIN
    figure = Figure(figsize=(width / 72, height / 72))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    page = _Page(axes, font, cell, known, depth_colours(len(numbers.capacity)))
    page.legend(shares, TITLE)
    top = TITLE + LEAD * (legend + 1)
    for block, lines in zip(blocks, heights, strict=True):
        for span in block:
            page.put(span, top)
        top += LEAD * (lines + 1)
    save_figure(figure, f"{shortened(name)}: how many recursions each token ran, and how many of all tokens did so", out)


@dataclass(frozen=True, slots=True)
class _Page:
    axes: Any
    font: Any
    cell: float
    known: frozenset[int]
    colours: list[str]

    def legend(self, shares: dict[int, float], top: float) -> None:
        for place, (depth, share) in enumerate(shares.items()):
            line, column = divmod(place, PER_LINE)
            x, y = MARGIN + column * self.cell * COLUMNS / PER_LINE, top + line * LEAD
            self._box(x, y, 3, depth)
            self._write(x, y, f" {depth} ", ink(self.colours[depth]))
            self._write(x + 4 * self.cell, y, f"{share:.1%}", "black")

    def put(self, span: TextSpan, top: float) -> None:
        x, y = MARGIN + span.column * self.cell, top + span.line * LEAD
        self._box(x, y, len(span.text), span.depth)
        self._write(x, y, span.text, ink(self.colours[span.depth]))

    def _box(self, x: float, y: float, letters: int, depth: int) -> None:
        from matplotlib.patches import Rectangle

        place = (x + 0.35, y + 0.8)
        box = Rectangle(place, letters * self.cell - 0.7, LEAD - 1.6, facecolor=self.colours[depth], linewidth=0)
        self.axes.add_patch(box)

    def _write(self, x: float, y: float, text: str, colour: str) -> None:
        shown = "".join(letter if ord(letter) in self.known else UNKNOWN for letter in text)
        self.axes.text(x, y + 0.73 * LEAD, shown, color=colour, fontproperties=self.font, va="baseline", parse_math=False)
