"""`fathomlm plot RUNS...`: the curves of training runs in one picture, with the numbers beside them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathomlm.lab.analyze.runs import RunSummary

HELP = "draw the curves of training runs"
DESCRIPTION = (
    "Draw training and validation loss of several runs, or another metric, into one picture; the final numbers stand "
    "beneath it and are printed. RUN is a run's directory, a directory of runs, or a metrics.jsonl."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="runs to draw: runs/*, runs, runs/tiny/metrics.jsonl")
    add("--out", metavar="FILE", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf (curves.png)")
    add("--x", metavar="AXIS", default="tokens", help="tokens, steps, time or flops (tokens)")
    metrics = "loss, validation, exits, lr, tokens_per_s, mfu, mfu_sustained or grad_norm (training and validation loss)"
    add("--metric", metavar="NAME", help=metrics)
    add("--smooth", metavar="F", type=float, help="how much training curves are smoothed, 0 to 0.99 (by their length)")
    add("--logy", action="store_true", help="draw the values on a logarithmic axis")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from fathomlm.lab.analyze.runs import read_runs
    from fathomlm.lab.analyze.runs_report import PlotOptions, check_out, plot
    from fathomlm.lab.drawing import check_matplotlib

    check_out(args.out)
    check_matplotlib()
    options = PlotOptions(x=args.x, metric=args.metric, smooth=args.smooth, logy=args.logy)
    summaries = plot(read_runs(args.runs), args.out, options)
    if args.json:
        print(json.dumps({"out": str(args.out), "runs": [summary.to_dict() for summary in summaries]}))
        return 0
    _print_table(summaries)
    print(f"drawn into {args.out}")
    return 0


def _print_table(summaries: list[RunSummary]) -> None:
    """The plot's table, with exits in rows of their own: a terminal has fewer columns than a picture."""
    from fathomlm.lab.analyze.runs_report import table_of
    from fathomlm.lab.tables import print_table

    header, *rows = table_of([dataclasses.replace(summary, exits={}) for summary in summaries])
    table = [header]
    for row, summary in zip(rows, summaries, strict=True):
        table.append(row)
        table += [[f"  exit after {depth}", "", "", "", "", f"{loss:.4f}", ""] for depth, loss in summary.exits.items()]
    print_table(table, caption="losses in nats per token")
