"""`fathomlm plot RUNS...`: the curves of training runs in one picture, with the numbers beside them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fathomlm.cli.common import JsonOptions
from fathomlm.lab.drawing import PlotOptions
from fathomlm.options import option, section

if TYPE_CHECKING:
    from fathomlm.lab.analyze.runs import RunSummary


@dataclass(frozen=True, kw_only=True)
class Plot(JsonOptions):
    """Draw training and validation loss of several runs, or another metric, into one picture; the final numbers stand
    beneath it and are printed. RUN is a run's directory, a directory of runs, or a metrics.jsonl."""

    runs: tuple[Path, ...] = option(positional=True, metavar="RUN", help="such as runs/*, runs, runs/tiny/metrics.jsonl")
    out: Path = option(Path("curves.png"), metavar="FILE", help="picture to write: .png, .svg or .pdf")
    curves: PlotOptions = section(PlotOptions)

    def run(self) -> int:
        from fathomlm.lab.analyze.runs import read_runs
        from fathomlm.lab.analyze.runs_report import check_out, plot
        from fathomlm.lab.drawing import check_matplotlib

        check_out(self.out)
        check_matplotlib()
        summaries = plot(read_runs(self.runs), self.out, self.curves)
        if self.json:
            print(json.dumps({"out": str(self.out), "runs": [dataclasses.asdict(summary) for summary in summaries]}))
            return 0
        _print_table(summaries)
        print(f"wrote {self.out}")
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
