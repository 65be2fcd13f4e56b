"""What all pictures have in common: a canvas of our own, the table under the curves, names that fit.

Everything is drawn with matplotlib's objects: no window, no global state. matplotlib is an extra, so it is imported where
something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fathomlm.errors import OptionError

LONGEST_NAME = 32
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
"""From the palette by Okabe and Ito, which people with any colour vision can tell apart; those that stand out on white."""
SELECTED, UNSELECTED = "#0072B2", "#E69F00"
"""Blue and orange of the same, as in the thesis."""


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OptionError("plots need matplotlib: pip install 'fathomlm[plot]'") from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure in inches whose parts make room for each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    return figure


def set_title(figure: Any, text: str) -> None:
    """A title that may hold what a user typed: a `$` in a path is no formula."""
    figure.suptitle(text, fontsize=12).set_parse_math(False)


def plain_axes(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_table(axes: Any, rows: Sequence[Sequence[str]], colors: Sequence[str]) -> None:
    """A header and a row for each colour; the first column is drawn in it."""
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
