"""`fathomlm simulate thesis`: the thesis' throughput tables from its own times, printed against simulated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import JsonOptions
from fathomlm.cli.progress import progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_common import print_record
from fathomlm.lab.simulate.presets import TABLES
from fathomlm.lab.tables import print_table
from fathomlm.options import option

if TYPE_CHECKING:
    from fathomlm.lab.simulate.thesis import ThesisTable


@dataclass(frozen=True, kw_only=True)
class Thesis(JsonOptions):
    """Simulate every row of tab_rrt:final_performance_throughput (40gb) and its 16 GB twin. The thesis prints neither exit
    trajectories nor sequence lengths; mean depths and two mean lengths are those at which some of its printed figures come
    out, and the rest is predicted. docs/simulate.md says which is which."""

    table: tuple[Literal["40gb", "16gb"], ...] = option((), help="which table; repeatable", default_text="both")
    sequences: int = option(2000, ge=1, help="sequences of SlimPajama and of RedPajama; the thesis: 20000")
    out: Path | None = option(None, metavar="FILE", help="also write the JSON object there")

    def run(self) -> int:
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise OptionError(f"cannot write {self.out}: {self.out.parent} is not a directory")
        from fathomlm.lab.simulate.thesis import thesis_table

        tables = []
        for name in dict.fromkeys(self.table or TABLES):
            with progress_bar(name, unit="rows") as update:
                tables.append(thesis_table(name, self.sequences, update))
        record = {"kind": "simulated thesis", "tables": [_record(table) for table in tables]}
        if self.out is not None:
            self.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if self.json:
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
        "texts": table.sequences,
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
        for way, (ours, printed) in ways.items():
            rows.append([one.model, way, *(f"{ours[name]:,.0f} ({printed[name]:,.0f})" for name in sets)])
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
    print(f"mean difference from the printed columns: {errors}; {table.sequences:,} sequences\n")
