"""What `simulate throughput --out` writes: the record, and a picture of it where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import Any

from fathomlm.errors import OutputError

WIDEST = 76
"""Characters of a line of the title."""
NAMES = {"vanilla": "vanilla", "sequence": "sequence-wise", "depth": "depth-wise"}


def write_simulation(out: Path, record: dict[str, Any]) -> list[str]:
    from fathomlm.errors import OptionError
    from fathomlm.lab.analyze.drawing import check_matplotlib

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write into {out}: {error}") from error
    try:
        check_matplotlib()
    except OptionError:
        return [str(out / "simulation.json")]
    draw_simulation(record, out / "simulation.png")
    return [str(out / name) for name in ("simulation.json", "simulation.png")]


def draw_simulation(record: dict[str, Any], out: Path) -> None:
    """Tokens a second of the three ways, with what each bar stands for beside it."""
    from fathomlm.checkpoints.writing import whole_file
    from fathomlm.lab.analyze.drawing import LINES, draw_table, new_figure, plain_axes, set_title

    figure = new_figure(8.4, 5.6)
    grid = figure.add_gridspec(2, 1, height_ratios=(4.0, 1.2))
    axes = figure.add_subplot(grid[0])
    colours = LINES[: len(NAMES)]
    speeds = [record[name]["tokens_per_s"] for name in NAMES]
    bars = axes.bar(list(NAMES.values()), speeds, color=colours, width=0.6)
    axes.bar_label(bars, labels=[f"{speed:,.0f}" for speed in speeds], padding=3)
    axes.set_ylabel("throughput (tokens per second)")
    axes.set_xlabel("batching")
    axes.margins(y=0.12)
    plain_axes(axes)
    rows = [["batching", "rows", "rows filled", "against vanilla", "against sequence-wise"]]
    for name, shown in NAMES.items():
        found = record[name]
        against = [f"x{found['tokens_per_s'] / record[base]['tokens_per_s']:.2f}" for base in ("vanilla", "sequence")]
        rows.append([shown, str(found["rows"]), f"{found['rows_filled']:.1%}", *against])
    draw_table(figure.add_subplot(grid[1]), rows, colours)
    depth = record["texts"]
    about = f"{depth['source']} depths, mean {depth['mean_depth']:.2f} of {depth['deepest']}; {depth['texts']:,} texts"
    set_title(figure, "\n".join(("Simulated throughput by batching", about, *wrap(record["costs"], WIDEST))))
    with whole_file(out) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
