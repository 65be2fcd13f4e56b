"""Text with each token on the color of its depth, as a picture (thesis 4, table "Visualization of the recursion depth").

A fixed-width font makes the layout exact: a letter is a cell, and a line is cut where its cells are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.display import visible
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.lab.analyze.routing import RoutingNumbers, ShownToken
from fathomlm.lab.drawing import save_figure, shortened

COLUMNS = 100
POINTS = 9.0
"""The size of letters."""
LEAD = 1.55 * POINTS
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

    font = FontProperties(family="DejaVu Sans Mono", size=POINTS)
    known = frozenset(get_font(findfont(font)).get_charmap())
    cell = POINTS * 0.602
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
