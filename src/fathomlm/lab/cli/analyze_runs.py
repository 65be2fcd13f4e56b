"""`fathomlm analyze runs RUN...`: a page about training runs, with the curves that `fathomlm plot` draws."""

from __future__ import annotations

import argparse
from pathlib import Path

from fathomlm.lab.cli.analyze_options import answer, out_directory

HELP = "training curves of one or several runs, as a page"
DESCRIPTION = (
    "Writes a page about training runs: losses, validation, exits, learning rate, speed and gradient norms, with the final "
    "numbers. RUN is a run's directory, a directory of runs, or a metrics.jsonl. `fathomlm plot` draws one of them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="runs to look at: runs/*, runs, runs/tiny/metrics.jsonl")
    add("--x", metavar="AXIS", default="tokens", help="tokens, steps, time or flops (tokens)")
    add("--smooth", metavar="F", type=float, help="how much training curves are smoothed, 0 to 0.99 (by their length)")
    add("--logy", action="store_true", help="draw losses on a logarithmic axis")
    add("--out", metavar="DIR", type=Path, help="directory to write (analysis/runs-NAME)")
    add("--force", action="store_true", help="replace DIR if it is a runs analysis")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    args.model = str(args.runs[0]) if len(args.runs) == 1 else f"{len(args.runs)}-places"  # names the directory
    out = out_directory(args, "runs")

    import dataclasses

    from fathomlm import __version__
    from fathomlm.lab.analyze.report import RunsAbout
    from fathomlm.lab.analyze.runs import read_runs, summarise
    from fathomlm.lab.analyze.runs_report import PlotOptions, table_of, write_runs

    options = PlotOptions(x=args.x, smooth=args.smooth, logy=args.logy)
    runs = read_runs(args.runs)
    summaries = [summarise(each) for each in runs]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    shown = RunsAbout(name=name, runs=[str(path) for path in args.runs], x=args.x, version=__version__)
    files = write_runs(runs, summaries, options, shown, out, args.force)
    table = table_of([dataclasses.replace(summary, exits={}) for summary in summaries])
    answer(args, shown, {"summaries": [summary.to_dict() for summary in summaries]}, [table], files)
    return 0
