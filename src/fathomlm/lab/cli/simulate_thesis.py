"""`fathomlm simulate thesis`: the thesis' throughput tables from its own times, printed against simulated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import layer_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_options import print_record
from fathomlm.lab.simulate.presets import TABLES
from fathomlm.lab.tables import print_table

if TYPE_CHECKING:
    from fathomlm.lab.simulate.thesis import ThesisTable

HELP = "the thesis' throughput tables again, from its A100 times: printed against simulated"
DESCRIPTION = (
    "Simulates every row of tab_rrt:final_performance_throughput (40gb) and its 16 GB twin. The thesis prints neither exit "
    "trajectories nor lengths of texts; mean depths and two mean lengths are those at which some of its printed figures "
    "come out, and the rest is predicted. docs/simulate.md says which is which."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--table", metavar="T", choices=TABLES, action="append", help="40gb or 16gb (both)")
    add("--texts", metavar="N", type=int, default=2000, help="texts of SlimPajama and of RedPajama (2000; the thesis 20000)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--out", metavar="FILE", type=Path, help="also write the JSON object there")


def run(args: argparse.Namespace) -> int:
    if args.texts < 1:
        raise OptionError(f"--texts must be >= 1, got {args.texts}")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise OptionError(f"cannot write {args.out}: {args.out.parent} is no directory")
    from fathomlm.lab.simulate.thesis import thesis_table

    tables = []
    for name in dict.fromkeys(args.table or TABLES):
        with layer_bar(name, unit="rows") as tell:
            tables.append(thesis_table(name, args.texts, tell))
    record = {"kind": "simulated thesis", "tables": [_record(table) for table in tables]}
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print_record(record)
        return 0
    for table in tables:
        _print(table)
    return 0


def _record(table: ThesisTable) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "table": table.table,
        "label": table.label,
        "texts": table.texts,
        "mean_lengths": table.means,
        "baselines": [asdict(one) for one in table.baselines],
        "rows": [row.record() for row in table.rows],
        "mean_error": {"delta_v": table.error("delta_v"), "delta_seq": table.error("delta_seq")},
    }


def _print(table: ThesisTable) -> None:
    sets = ("slimpajama", "redpajama", "pg19")
    rows = [["plain model", "batching", *sets]]
    for one in table.baselines:
        ways = {"vanilla": (one.vanilla, one.printed_vanilla), "sequence-wise": (one.sequence, one.printed_sequence)}
        for way, (ours, said) in ways.items():
            rows.append([one.model, way, *(f"{ours[name]:,.0f} ({said[name]:,.0f})" for name in sets)])
    print_table(rows, f"{table.label}: tokens/s, simulated (printed)")
    rows = [["model", "CE", "depths", "Delta_V", "printed", "Delta_Seq", "printed"]]
    for row in table.rows:
        depths = " ".join(f"{row.depths[name]:.2f}" for name in sets)
        deltas = (row.delta_v, row.printed.delta_v, row.delta_seq, row.printed.delta_seq)
        name = row.printed.name.partition("/")[2]
        rows.append([name, f"{row.printed.coefficient:g}", depths, *(f"{delta:.2f}" for delta in deltas)])
    print_table(
        rows, "depth-wise batching. depths: means at which the 40 GB table's throughput comes out. CE: loss coefficient"
    )
    errors = " and ".join(f"{table.error(name):.1%} ({name})" for name in ("delta_v", "delta_seq"))
    print(f"mean difference from the printed columns: {errors}; {table.texts:,} texts\n")
