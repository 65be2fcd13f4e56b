"""Results as rows of text: a header, and rows whose first column is a name. The same rows are printed, drawn under pictures,
shown in pages and written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fathomlm import sizes

Rows = list[list[str]]


def print_table(
    rows: Sequence[Sequence[str]], title: str | None = None, *, caption: str | None = None, text_columns: int = 1
) -> None:
    """The first row is the header. The first `text_columns` are aligned to the left, numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(text: str | None) -> Text | None:
        return None if text is None else Text(text)

    table = Table(
        title=plain(title), caption=plain(caption), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD
    )
    for column, name in enumerate(rows[0]):
        word = max(map(len, name.split()), default=0)  # a narrow terminal folds cells, and breaks no word of a heading
        table.add_column(name, justify="left" if column < text_columns else "right", overflow="fold", min_width=word)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console().print(table)


def markdown(rows: Rows) -> list[str]:
    """The lines of a Markdown table; numbers to the right."""
    numeric = [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    line = "|".join("--:" if right else "---" for right in numeric)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(cells[0])} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells[1:])]


amount = partial(sizes.amount, digits=3)
"""A large number for people: 53.3B, 118M."""


def optional(value: float | None, form: str) -> str:
    """A number in a format; a dash where there is none."""
    return "-" if value is None else format(value, form)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:1] in "+-"
