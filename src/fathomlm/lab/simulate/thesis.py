"""The thesis' hypothetical throughput again (`tab_rrt:final_performance_throughput` and `..._16gb`), by our scheduler.

It prints neither its exit trajectories nor the lengths of its sequences. This is what can be had from what it does print:

- PG19 has the same throughput with and without sequence-wise batching, so all its sequences are equally long; its
  published test set has 100 books, and with 100 sequences the printed figures come out.
- The lengths of SlimPajama and RedPajama are drawn from an exponential distribution that is cut off, with one mean each: the
  one at which the plain Gemma's printed throughput without sequence-wise batching comes out (two printed numbers).
- The mean depth of a model on a dataset is the one at which its printed throughput comes out, from the 40 GB table.

All else is then a prediction: the baselines of the other two models, with them the Delta columns of the 40 GB table, and all
of the 16 GB table.

Presets are its A100 measurements as tables of times (`tab_rrt:measured_generation_time_a100` and `..._16gb`). It prints
times for a token, that is the time of a forward pass over its batch size. Only a batch of one and the
largest that fitted are printed; what it measured in between is not known. Its throughput counts Transformer blocks alone,
and so do these tables unless `ends` are asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.resources import files
from statistics import fmean
from typing import Any, Literal

from fathomlm.checkpoints.writing import whole_file
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.errors import OptionError, choices
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.costs import NOTHING, Costs, TimeCurve
from fathomlm.lab.simulate.devices import PlainDevice
from fathomlm.lab.simulate.options import Thesis
from fathomlm.lab.simulate.policies import loop_device, run_vanilla
from fathomlm.lab.simulate.simulation import EngineSetup, Simulation
from fathomlm.lab.simulate.trajectories import Trajectories, draw

Table = Literal["40gb", "16gb"]
TABLES: tuple[Table, ...] = ("40gb", "16gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """What the rows of both tables are of."""

    table: Table
    model: str
    blocks: int
    """How often the shared block is looped; 1 is the plain model."""
    rank: int
    """Of the LoRA on every linear; 0 without."""

    @property
    def name(self) -> str:
        looped = "" if self.blocks == 1 else f"/{self.blocks}"
        return f"{self.table}/{self.model}{looped}" + (f"/{self.rank}" if self.rank else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetTimes(TableRow):
    """One row: a model on the A100."""

    label: str
    """Of the table in the thesis."""
    batch: int
    """The largest that fitted."""
    embedding: TimeCurve
    transformer: TimeCurve
    """A pass over all layers of a plain model, over the block of another."""
    head: TimeCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedRow(TableRow):
    """One row of the thesis' throughput tables."""

    batching: Literal["vanilla", "CSB", "CDB"]
    coefficient: float | None
    """Of the intermediate losses in early-exit training."""
    batch: int
    slimpajama: float
    redpajama: float
    pg19: float
    delta_v: float
    delta_seq: float


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("thesis_a100.json").read_text(encoding="utf-8"))
    return found


def all_times() -> Iterator[PresetTimes]:
    for table in TABLES:
        found = _data()["tables"][table]
        for row in found["times"]:
            curves = {
                name: TimeCurve(tuple((t["batch"], t["batch"] * t[name]) for t in row["times"]))
                for name in ("embedding", "transformer", "head")
            }
            yield PresetTimes(
                table=table,
                label=found["label"],
                model=row["model"],
                blocks=row["blocks"],
                rank=row["rank"],
                batch=row["times"][-1]["batch"],
                **curves,
            )


def all_printed(table: Table) -> list[PrintedRow]:
    names = [field.name for field in dataclasses.fields(PrintedRow) if field.name != "table"]
    return [PrintedRow(table=table, **{name: row[name] for name in names}) for row in _data()["tables"][table]["results"]]


def find_times(name: str) -> PresetTimes:
    """By its name, such as 40gb/gemma-2b/2 or 16gb/pythia-1b/2/64."""
    known = {times.name: times for times in all_times()}
    if name not in known:
        raise OptionError(choices("preset", name, known))
    return known[name]


def looped_preset(name: str) -> PresetTimes:
    times = find_times(name)
    if times.blocks == 1:
        raise OptionError(f"preset '{name}' is a plain model, which has no depths; add its blocks, such as {name}/2")
    return times


def plain_of(times: PresetTimes) -> PresetTimes:
    """The plain model that a preset is compared with."""
    return find_times(f"{times.table}/{times.model}")


def preset_costs(times: PresetTimes, ends: bool = False) -> Costs:
    """A preset's times and its plain model's. With `ends` embedding and head count too."""
    plain = plain_of(times)
    outer = times.embedding + times.head if ends else NOTHING
    plain_outer = plain.embedding + plain.head if ends else NOTHING
    return Costs(
        name=f"A100 preset {times.name} ({times.label}, {'with' if ends else 'without'} embedding and head)",
        passes={
            "step": plain.transformer + plain_outer,
            "core": times.transformer,
            "turn": outer,
            "both": times.transformer + outer,
        },
        largest=times.batch,
    )


SETS = ("slimpajama", "redpajama", "pg19")
BOOKS = 100
"""Sequences of PG19's test set."""
LONGEST = 32
"""Tokens of the longest sequence. Throughput does not depend on the scale of lengths, only on their ratios."""
BOOK_TOKENS = 256
FITTED = "gemma-2b"
"""The model whose plain throughput says how long sequences are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    """One row of a table, printed and simulated."""

    printed: PrintedRow
    depths: dict[str, float]
    """By set of sequences, the mean depth that was taken."""
    throughput: dict[str, float]
    delta_v: float
    delta_seq: float

    def record(self) -> dict[str, Any]:
        return {
            "preset": self.printed.name,
            "coefficient": self.printed.coefficient,
            "mean_depth": self.depths,
            "tokens_per_s": self.throughput,
            "delta_v": self.delta_v,
            "delta_seq": self.delta_seq,
            "printed_delta_v": self.printed.delta_v,
            "printed_delta_seq": self.printed.delta_seq,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The plain model, printed and simulated."""

    model: str
    vanilla: dict[str, float]
    sequence: dict[str, float]
    printed_vanilla: dict[str, float]
    printed_sequence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThesisTable:
    table: Table
    label: str
    sequences: int
    means: dict[str, float]
    """By set, the mean length over the longest that was fitted."""
    baselines: list[Baseline]
    rows: list[SimulatedRow]

    def error(self, column: str) -> float:
        """The mean relative difference from the printed column, delta_v or delta_seq."""
        return fmean(abs(getattr(row, column) / getattr(row.printed, column) - 1) for row in self.rows)


def parts_for(depth: float, deepest: int) -> tuple[float, ...]:
    """Parts of all tokens that run each depth, each the same part of the one before, so that the mean is `depth`."""
    depth = min(max(depth, 1.001), float(deepest))
    low, high = 0.0, 1.0
    for _ in range(60):
        part = (low + high) / 2
        low, high = (part, high) if sum(part**r for r in range(deepest)) < depth else (low, part)
    return tuple(high**r for r in range(deepest))


@lru_cache(maxsize=8)
def lengths(mean: float, sequences: int) -> tuple[int, ...]:
    """Exponential lengths, cut off at the longest, whose mean is this part of it."""
    generator = random.Random(0)
    drawn = [-math.log(1 - generator.random()) for _ in range(sequences)]
    low, high = 1e-3, 1e3
    for _ in range(60):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if fmean(min(1.0, scale * one) for one in drawn) < mean else (low, scale)
    return tuple(max(1, round(LONGEST * min(1.0, high * one))) for one in drawn)


def fit_mean(printed: float, sequences: int) -> float:
    """The mean length at which the plain model that is fitted has this throughput without sequence-wise batching."""
    times = find_times(f"40gb/{FITTED}")
    low, high = 0.02, 0.999
    for _ in range(12):
        mean = (low + high) / 2
        found = run_vanilla(_plain(lengths(mean, sequences)), preset_costs(times), times.batch).tokens_per_s
        low, high = (mean, high) if found < printed else (low, mean)
    return (low + high) / 2


def thesis_table(table: Table, sequences: int = 5000, on_row: OnProgress = unwatched) -> ThesisTable:
    """All rows of one table. `sequences` is how many SlimPajama and RedPajama have; the thesis' queue has 20,000."""
    printed = all_printed(table)
    first = next(row for row in all_printed("40gb") if row.model == FITTED and row.batching == "vanilla")
    means = {name: fit_mean(getattr(first, name), sequences) for name in SETS[:2]}
    sets = {name: lengths(mean, sequences) for name, mean in means.items()} | {"pg19": (BOOK_TOKENS,) * BOOKS}
    baselines = [_baseline(table, model, sets) for model in dict.fromkeys(row.model for row in printed)]
    by_model = {one.model: one for one in baselines}
    rows = []
    looped = [row for row in printed if row.batching == "CDB"]
    for done, row in enumerate(looped, start=1):
        rows.append(_again(row, sets, by_model[row.model]))
        on_row(done, len(looped))
    label = find_times(f"{table}/{FITTED}").label
    return ThesisTable(table=table, label=label, sequences=sequences, means=means, baselines=baselines, rows=rows)


def _baseline(table: Table, model: str, sets: dict[str, tuple[int, ...]]) -> Baseline:
    times = find_times(f"{table}/{model}")
    costs, setting = preset_costs(times), EngineSetup(max_sequences=times.batch)
    rows = {row.batching: row for row in all_printed(table) if row.model == model and row.blocks == 1}
    return Baseline(
        model=model,
        vanilla={name: run_vanilla(_plain(found), costs, times.batch).tokens_per_s for name, found in sets.items()},
        sequence={
            name: Simulation(PlainDevice(setting.max_sequences), setting, costs, _plain(found)).run().tokens_per_s
            for name, found in sets.items()
        },
        printed_vanilla={name: getattr(rows["vanilla"], name) for name in sets},
        printed_sequence={name: getattr(rows["CSB"], name) for name in sets},
    )


def _again(row: PrintedRow, sets: dict[str, tuple[int, ...]], baseline: Baseline) -> SimulatedRow:
    times = find_times(row.name)
    depths = implied_depths(row)
    found = {name: _throughput(times, sets[name], depths[name]) for name in SETS}
    return SimulatedRow(
        printed=row,
        depths=depths,
        throughput=found,
        delta_v=fmean(found.values()) / fmean(baseline.vanilla.values()),
        delta_seq=fmean(found.values()) / fmean(baseline.sequence.values()),
    )


def implied_depths(row: PrintedRow) -> dict[str, float]:
    """The mean depths at which a model's printed throughput comes out, from the table of 40 GB."""
    same = [one for one in all_printed("40gb") if _who(one) == _who(row)]
    assert len(same) == 1, f"{row.name} is in the table once"
    times = find_times(same[0].name)
    full = 1e3 * times.batch / times.transformer.at(times.batch)
    found = {name: min(max(full / getattr(same[0], name), 1.0), float(times.blocks)) for name in SETS[:2]}
    return found | {"pg19": _depth_of_books(times, same[0].pg19)}


def _who(row: PrintedRow) -> tuple[str, int, int, float | None, str]:
    return row.model, row.blocks, row.rank, row.coefficient, row.batching


@lru_cache(maxsize=64)
def _depth_of_books(times: PresetTimes, printed: float) -> float:
    low, high = 1.0, float(times.blocks)
    for _ in range(6):
        depth = (low + high) / 2
        low, high = (depth, high) if _throughput(times, (BOOK_TOKENS // 4,) * BOOKS, depth) > printed else (low, depth)
    return (low + high) / 2


def _throughput(times: PresetTimes, found: Iterable[int], depth: float) -> float:
    sequences = draw(((1, length) for length in found), parts_for(depth, times.blocks))
    setting = EngineSetup(max_sequences=times.batch)
    device = loop_device(sequences, times.batch)
    return Simulation(device, setting, preset_costs(times), sequences).run().tokens_per_s


@lru_cache(maxsize=8)
def _plain(found: tuple[int, ...]) -> Trajectories:
    return draw(((1, length) for length in found), (1.0,))


def run(options: Thesis) -> int:
    tables = []
    for name in dict.fromkeys(options.table or TABLES):
        with progress_bar(name, unit="rows") as update:
            tables.append(thesis_table(name, options.sequences, update))
    record = {"kind": "simulated thesis", "tables": [_record(table) for table in tables]}
    if options.out is not None:
        with whole_file(options.out) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def show(record: dict[str, Any]) -> None:
        for table in tables:
            _print(table)

    return options.answer(record, show)


def _record(table: ThesisTable) -> dict[str, Any]:
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
    rows = [["plain model", "batching", *SETS]]
    for one in table.baselines:
        ways = {"vanilla": (one.vanilla, one.printed_vanilla), "sequence-wise": (one.sequence, one.printed_sequence)}
        for way, (ours, printed) in ways.items():
            rows.append([one.model, way, *(f"{ours[name]:,.0f} ({printed[name]:,.0f})" for name in SETS)])
    print_table(rows, f"{table.label}: tokens/s, simulated (printed)")
    rows = [["model", "CE", "depths", "Delta_V", "printed", "Delta_Seq", "printed"]]
    for row in table.rows:
        depths = " ".join(f"{row.depths[name]:.2f}" for name in SETS)
        deltas = (row.delta_v, row.printed.delta_v, row.delta_seq, row.printed.delta_seq)
        name = row.printed.name.partition("/")[2]
        rows.append([name, f"{row.printed.coefficient:g}", depths, *(f"{delta:.2f}" for delta in deltas)])
    print_table(
        rows, "depth-wise batching. depths: means at which the 40 GB table's throughput comes out. CE: loss coefficient"
    )
    errors = " and ".join(f"{table.error(name):.1%} ({name})" for name in ("delta_v", "delta_seq"))
    print(f"mean difference from the printed columns: {errors}; {table.sequences:,} sequences\n")
