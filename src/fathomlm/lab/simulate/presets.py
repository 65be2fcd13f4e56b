"""The thesis' A100 measurements as tables of times (`tab_rrt:measured_generation_time_a100` and `..._16gb`), and the
throughput that it computed from them, for comparison.

The thesis prints times for a token, that is the time of a forward pass over its batch size. Only a batch of one and the
largest that fitted are printed; what it measured in between is not known. Its throughput counts Transformer blocks alone,
and so do these tables unless `ends` are asked for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from fathomlm.errors import OptionError, choices
from fathomlm.lab.simulate.costs import NOTHING, Costs, TimeCurve

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
