"""What all pictures have in common: panels over a table, under a title, in a file that appears whole.

Everything is drawn with matplotlib's objects: no window, no global state. matplotlib is an extra, so it is imported where
something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import OptionError

LONGEST_NAME = 32
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
"""From the palette by Okabe and Ito, which people with any color vision can tell apart; those that stand out on white."""
SELECTED, UNSELECTED = "#0072B2", "#E69F00"
"""Blue and orange of the same, as in the thesis."""
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STAR: dict[str, Any] = {"marker": "*", "linestyle": "none", "markeredgecolor": "black", "markeredgewidth": 0.6}
"""A point that stands out among others."""
TABLE_LINE, TITLE = 0.27, 0.5
"""Inches of a line of the table, and of the title."""


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OptionError("plots require matplotlib: pip install 'fathomlm[plot]'") from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure in inches whose parts make room for each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    return figure


def figure_over_table(
    width: float,
    heights: Sequence[float],
    table: Sequence[Sequence[str]],
    colors: Sequence[str] | None = None,
    *,
    columns: int = 1,
    width_ratios: Sequence[float] | None = None,
) -> tuple[Any, Any]:
    """A figure and the grid of its panels, a row for each of `heights` (inches); the table stands under them. `colors` are
    those of the table's rows, black without."""
    table_height = TABLE_LINE * (len(table) + 1)
    figure = new_figure(width, sum(heights) + table_height + TITLE)
    ratios = {} if width_ratios is None else {"width_ratios": width_ratios}
    grid = figure.add_gridspec(len(heights) + 1, columns, height_ratios=(*heights, table_height), **ratios)
    draw_table(figure.add_subplot(grid[len(heights), :]), table, colors or ["black"] * (len(table) - 1))
    return figure, grid


def save_figure(figure: Any, title: str, out: Path, kind: str = "png", *, dpi: int = 150) -> None:
    """The file appears whole or not at all. The title may hold what a user typed: a `$` in a path is no formula."""
    figure.suptitle(title, fontsize=12).set_parse_math(False)
    with whole_file(out) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, metadata={"Software": None} if kind == "png" else None)


def plain_axes(axes: Any, title: str | None = None, x: str | None = None, y: str | None = None) -> None:
    """A grid behind what is drawn and no box around it; with a title and the axes' names, where given."""
    if title is not None:
        axes.set_title(title, fontsize=10.5)
    if x is not None:
        axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_table(axes: Any, rows: Sequence[Sequence[str]], colors: Sequence[str]) -> None:
    """A header and a row for each color; the first column is drawn in it."""
    axes.set_axis_off()
    shown = [[shortened(row[0]), *row[1:]] for row in rows]
    widths = [max(len(row[column]) for row in shown) + 2 for column in range(len(shown[0]))]
    table = axes.table(
        cellText=shown,
        colWidths=[width / sum(widths) for width in widths],
        loc="center",
        bbox=(0, 0, 1, 1),
        edges="horizontal",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8.5 if sum(widths) < 110 else 7)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        cell.PAD = 0.02
        cell.set_text_props(ha="left" if column == 0 else "right")
        if row == 0:
            cell.set_text_props(weight="bold")
        elif column == 0:
            cell.set_text_props(color=colors[row - 1], weight="bold")


def shortened(name: str) -> str:
    """A name with its middle left out where it is long: names differ at their ends."""
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
