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
    from fathomlm.lab.drawing import check_matplotlib

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
    from fathomlm.lab.drawing import LINES, figure_over_table, plain_axes, save_figure

    colours = LINES[: len(NAMES)]
    rows = [["batching", "batch size", "filled", "against vanilla", "against sequence-wise"]]
    for name, shown in NAMES.items():
        found = record[name]
        against = [f"x{found['tokens_per_s'] / record[base]['tokens_per_s']:.2f}" for base in ("vanilla", "sequence")]
        rows.append([shown, str(found["batch_size"]), f"{found['batch_filled']:.1%}", *against])
    figure, grid = figure_over_table(8.4, [4.0], rows, colours)
    axes = figure.add_subplot(grid[0])
    speeds = [record[name]["tokens_per_s"] for name in NAMES]
    bars = axes.bar(list(NAMES.values()), speeds, color=colours, width=0.6)
    axes.bar_label(bars, labels=[f"{speed:,.0f}" for speed in speeds], padding=3)
    axes.margins(y=0.12)
    plain_axes(axes, x="batching", y="throughput (tokens per second)")
    depth = record["sequences"]
    about = (
        f"{depth['source']} depths, mean {depth['mean_depth']:.2f} of {depth['deepest']}; {depth['sequences']:,} sequences"
    )
    save_figure(figure, "\n".join(("Simulated throughput by batching", about, *wrap(record["costs"], WIDEST))), out)
