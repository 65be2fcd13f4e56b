"""The thesis' hypothetical throughput again (`tab_rrt:final_performance_throughput` and `..._16gb`), by our scheduler.

It prints neither its exit trajectories nor the lengths of its sequences. This is what can be had from what it does print:

- PG19 has the same throughput with and without sequence-wise batching, so all its sequences are equally long; its
  published test set has 100 books, and with 100 sequences the printed figures come out.
- The lengths of SlimPajama and RedPajama are drawn from an exponential distribution that is cut off, with one mean each: the
  one at which the plain Gemma's printed throughput without sequence-wise batching comes out (two printed numbers).
- The mean depth of a model on a dataset is the one at which its printed throughput comes out, from the 40 GB table.

All else is then a prediction: the baselines of the other two models, with them the Delta columns of the 40 GB table, and all
of the 16 GB table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from fathomlm.lab.simulate.costs import Costs
from fathomlm.lab.simulate.policies import loop_device, run_depth, run_sequence, run_vanilla
from fathomlm.lab.simulate.presets import PresetTimes, PrintedRow, Table, all_printed, find_times, preset_costs
from fathomlm.lab.simulate.simulation import EngineSetup
from fathomlm.lab.simulate.trajectories import Trajectories, draw

SETS = ("slimpajama", "redpajama", "pg19")
BOOKS = 100
"""Sequences of PG19's test set."""
LONGEST = 32
"""Tokens of the longest sequence. Throughput does not depend on the scale of lengths, only on their ratios."""
BOOK_TOKENS = 256
FITTED = "gemma-2b"
"""The model whose plain throughput says how long sequences are."""
OnProgress = Callable[[int, int], None]


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
        found = run_vanilla(_plain(lengths(mean, sequences)), _costs(times), times.batch).tokens_per_s
        low, high = (mean, high) if found < printed else (low, mean)
    return (low + high) / 2


def thesis_table(table: Table, sequences: int = 5000, on_row: OnProgress | None = None) -> ThesisTable:
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
        if on_row is not None:
            on_row(done, len(looped))
    label = find_times(f"{table}/{FITTED}").label
    return ThesisTable(table=table, label=label, sequences=sequences, means=means, baselines=baselines, rows=rows)


def _baseline(table: Table, model: str, sets: dict[str, tuple[int, ...]]) -> Baseline:
    times = find_times(f"{table}/{model}")
    costs, setting = _costs(times), EngineSetup(max_sequences=times.batch)
    rows = {row.batching: row for row in all_printed(table) if row.model == model and row.blocks == 1}
    return Baseline(
        model=model,
        vanilla={name: run_vanilla(_plain(found), costs, times.batch).tokens_per_s for name, found in sets.items()},
        sequence={name: run_sequence(_plain(found), costs, setting).tokens_per_s for name, found in sets.items()},
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
    return run_depth(sequences, preset_costs(times), setting, loop_device(sequences, times.batch)).tokens_per_s


@lru_cache(maxsize=8)
def _plain(found: tuple[int, ...]) -> Trajectories:
    return draw(((1, length) for length in found), (1.0,))


def _costs(times: PresetTimes) -> Costs:
    return preset_costs(times)
