"""`fathomlm simulate [throughput] [MODEL]`: three ways to batch the same sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import SOURCE, JsonOptions
from fathomlm.cli.first import check_shape
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError, OutputError
from fathomlm.lab.cli.bench_setup import GpuOptions, PlannedModelOptions
from fathomlm.lab.cli.eval_common import print_record
from fathomlm.lab.cli.simulate_sources import SequenceOptions, SimulationSource, read_sequences
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option, section

if TYPE_CHECKING:
    from fathomlm.lab.simulate.costs import Costs
    from fathomlm.lab.simulate.devices import Device
    from fathomlm.lab.simulate.policies import Comparison
    from fathomlm.lab.simulate.simulation import EngineSetup, MemoryFit
    from fathomlm.lab.simulate.trajectories import Trajectories

WIDEST = 76
"""Characters of a line of the title."""
NAMES = {"vanilla": "vanilla", "sequence": "sequence-wise", "depth": "depth-wise"}
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """How long forward passes take."""

    preset: str | None = option(
        None, metavar="NAME", help="the thesis' A100: 40gb/gemma-2b/2, 16gb/pythia-1b/2/64 (table/model/blocks/rank)"
    )
    ends: bool = option(False, requires=("preset",), help="--preset: count embedding and head, which the thesis leaves out")
    costs: Path | None = option(None, metavar="FILE", help="table of milliseconds by batch size (JSON or YAML)")
    measure: bool = option(False, help="time the engine's own passes of MODEL on this device, with random weights")
    context: int = option(256, ge=1, help="--measure: tokens that each sequence attends to")

    def __post_init__(self) -> None:
        if len([name for name in ("preset", "costs", "measure") if getattr(self, name)]) != 1:
            raise OptionError("give the times of passes with one of --preset NAME, --costs FILE and --measure")


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """The batches, and what fits."""

    batch_size: int | None = like(EngineOptions, "batch_size", None, default_text=f"the preset's largest, or {BATCH}")
    plain_batch_size: int | None = like(
        EngineOptions,
        "batch_size",
        None,
        help="batch size of the plain model",
        default_text="its preset's largest, or as many",
    )
    max_sequences: int | None = like(
        EngineOptions, "max_sequences", default_text="--batch-size; with --measure twice that",
        help="max concurrent sequences, depth-wise",
    )  # fmt: skip
    gpu_memory: int | None = like(GpuOptions, "gpu_memory", help="limit the sequences to those that fit a GPU, such as 16GB")
    fill: Literal["free", "exact"] = option(
        "free",
        help="deeper KV of a token that exits: free, as in the thesis, or exact, as the engine computes it",
    )  # fmt: skip
    waiting: Literal["shrink", "pad"] = option(
        "shrink",
        help="vanilla: a batch whose sequences end takes the time of those left, as in the thesis, or as before",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulateThroughput(PlannedModelOptions, JsonOptions):
    """Compare vanilla, sequence-wise and depth-wise batching of the same sequences. Requires how deep tokens go
    (--trajectories, --depths, or --data through MODEL) and how long passes take (--preset, --costs or --measure). All
    sequences are there from the start. The plain model is the baseline: without and with sequence-wise batching. The last
    two ways run the engine's scheduler and page pool, with a clock for a device."""

    model: str | None = option(
        None, positional=True, first=check_shape,
        help=f"{SOURCE}: for --data and --measure, and for --gpu-memory without a preset",
    )  # fmt: skip
    out: Path | None = option(
        None, metavar="DIR", help="also write simulation.json, and simulation.png where matplotlib is installed"
    )
    sequences: SequenceOptions = section(SequenceOptions, "sequences")
    costs: CostOptions = section(CostOptions, "times")
    batching: BatchingOptions = section(BatchingOptions, "batching")

    def __post_init__(self) -> None:
        data, costs, batching = self.sequences.data, self.costs, self.batching
        if costs.measure and self.model is None:
            raise OptionError("--measure requires a MODEL, such as smollm-135m --dummy --recursions 3")
        if batching.fill == "exact" and costs.measure:
            raise OptionError("--fill exact cannot be combined with --measure; `simulate validate` measures exits exactly")
        if batching.gpu_memory is not None and self.model is None and costs.preset is None:
            raise OptionError("--gpu-memory requires a MODEL or a --preset, whose weights and KV cache are counted")
        if data and self.model is None:
            raise OptionError("--data requires a MODEL")
        if data and self.dummy:
            raise OptionError("--data cannot be combined with --dummy: it requires the model's own weights")
        if self.model is not None and not data and not costs.measure and batching.gpu_memory is None:
            raise OptionError(
                "MODEL requires --data, --measure or --gpu-memory; the preset and the table of times need none"
            )

    def run(self) -> int:
        source = read_sequences(self.sequences, self, self.model)
        if self.sequences.save is not None:
            from fathomlm.lab.simulate.trajectories import write_trajectories

            write_trajectories(self.sequences.save, source.trajectories)
        simulated = _Simulated(self, source)
        record = simulated.record(simulated.compare())
        if self.out is not None:
            record["files"] = write_simulation(self.out, record)
        if self.json:
            print_record(record)
            return 0
        print_table(table(record), title(record))
        for note in record["notes"]:
            print(note)
        for file in record.get("files", []):
            print(f"wrote {file}")
        return 0


class _Simulated:
    """The three simulations that the options ask for."""

    def __init__(self, options: SimulateThroughput, source: SimulationSource) -> None:
        from fathomlm.lab.simulate.presets import looped_preset, plain_of

        self.options, self.source = options, source
        self.sequences: Trajectories = source.trajectories
        self.notes: list[str] = []
        times = None if self.options.costs.preset is None else looped_preset(self.options.costs.preset)
        if times is not None and times.blocks != self.sequences.deepest:
            raise OptionError(
                f"preset '{self.options.costs.preset}' loops its block {times.blocks} times, but depths go up to "
                f"{self.sequences.deepest}"
            )
        self.times = times
        rooms = self._memory_fits()
        self.batch_size = self.options.batching.batch_size or self._fitting(
            rooms and rooms[1], None if times is None else times.batch
        )
        same = self.batch_size if times is None and rooms is None else None
        plain = None if times is None else plain_of(times).batch
        self.plain_batch_size = self.options.batching.plain_batch_size or same or self._fitting(rooms and rooms[0], plain)
        self.max_sequences = self.options.batching.max_sequences or (
            2 * self.batch_size if self.options.costs.measure else self.batch_size
        )
        self.costs, self.plain_costs = self._read_costs()
        self._settle(rooms)

    def _fitting(self, room: MemoryFit | None, measured: int | None) -> int:
        """The largest batch that fits and was measured."""
        known = [rows for rows in (room and room.sequences, measured) if rows]
        return min(known) if known else BATCH

    def compare(self) -> Comparison:
        from fathomlm.cli.progress import progress_bar
        from fathomlm.lab.simulate.policies import compare

        with progress_bar("simulating", unit="tokens") as update:
            return compare(
                self.sequences, self.costs, plain=self.plain_setting, deep=self.setting, device=self.device,
                plain_costs=self.plain_costs, waiting=self.options.batching.waiting, on_progress=update,
            )  # fmt: skip

    def record(self, comparison: Comparison) -> dict[str, Any]:
        from fathomlm import __version__

        limits = (("the model", self.costs, self.batch_size), ("the plain model", self.plain_costs, self.plain_batch_size))
        for who, costs, rows in limits:
            if costs.largest is not None and rows > costs.largest:
                self.notes.append(
                    f"{who}: a batch size of {rows} is beyond the {costs.largest} that were measured; times go on straight"
                )
        if self.sequences.source in ("oracle", "forced"):
            self.notes.append(f"depths are {self.sequences.source}: no model that decodes would choose just these")
        return {
            "kind": "simulation",
            "version": __version__,
            "sequences": self.sequences.record(),
            "costs": self.costs.name,
            "between_batch_sizes": "linear interpolation",
            "fill": self._fill(),
            "waiting": self.options.batching.waiting,
            "model": self.options.model,
            "preset": self.options.costs.preset,
            "memory": self.options.batching.gpu_memory,
            **comparison.record(),
            "notes": self.notes,
        }

    def _fill(self) -> str:
        routed = self.source.plan is not None and self.source.plan.routing is not None
        return (
            "none needed: a routed model has no entries at depths that were not run"
            if routed
            else self.options.batching.fill
        )

    def _read_costs(self) -> tuple[Costs, Costs]:
        from fathomlm.lab.simulate.costs import read_costs
        from fathomlm.lab.simulate.presets import preset_costs

        if self.times is not None:
            found = preset_costs(self.times, self.options.costs.ends)
            return found, found
        if self.options.costs.costs is not None:
            found = read_costs(self.options.costs.costs, self.sequences.deepest)
            return found, found
        return self._measure()

    def _measure(self) -> tuple[Costs, Costs]:
        from fathomlm.cli.common import memory_errors
        from fathomlm.cli.progress import progress_bar
        from fathomlm.lab.simulate.measured import MeasuredShape, measure_loop, measure_plain

        shape = MeasuredShape(**self.source.shape(self.options))
        with memory_errors("--batch-size or --context"), progress_bar("measuring", unit="batch sizes") as update:
            plain = measure_plain(shape, _some(self.plain_batch_size), self.options.costs.context, update)
            return measure_loop(shape, _some(self.batch_size), self.options.costs.context, update), plain

    def _memory_fits(self) -> tuple[MemoryFit, MemoryFit] | None:
        """What fits the memory of the plain model and of this one."""
        if self.options.batching.gpu_memory is None:
            return None
        from fathomlm.depth import DepthPlan
        from fathomlm.lab.simulate.simulation import fit_memory

        architecture, plan, relaxation = self.source.planned(self.times)
        fields = {"memory": self.options.batching.gpu_memory, "length": self.sequences.longest}
        plain = architecture.with_layers(tuple(step.origin for step in plan))
        return (
            fit_memory(plain, DepthPlan.vanilla(plain.layers), None, **fields),
            fit_memory(architecture, plan, relaxation, **fields),
        )

    def _settle(self, rooms: tuple[MemoryFit, MemoryFit] | None) -> None:
        from fathomlm.engine.programs.routed import passes_for
        from fathomlm.lab.simulate.devices import LoopDevice
        from fathomlm.lab.simulate.policies import loop_device, with_lookahead
        from fathomlm.lab.simulate.simulation import EngineSetup

        plan = self.source.plan
        own = plan is not None and plan.routing is not None and plan.kv == "cache"
        outer = own and plan is not None and any(step.part != "core" for step in plan)
        cores = passes_for(self.sequences.mean_depth) if self.options.costs.measure else None
        tables: tuple[int, ...] = (0,)
        if own:
            tables = (*((0,) if outer else ()), *[int(outer)] * self.sequences.deepest)
            self.device: Device = LoopDevice(
                self.batch_size, cores or (1,), recursions=self.sequences.deepest, own=True, outer=outer
            )
        else:
            self.device = loop_device(self.sequences, self.batch_size, self.options.batching.fill, cores)
        pages = None if rooms is None else rooms[1].pool_pages
        plain_pages = None if rooms is None else rooms[0].pool_pages
        chunk = self._chunk()
        deep = EngineSetup(max_sequences=self.max_sequences, tables=tables, pool_pages=pages, prefill_chunk=chunk)
        plain = EngineSetup(max_sequences=self.plain_batch_size, pool_pages=plain_pages, prefill_chunk=chunk)
        self.setting: EngineSetup = with_lookahead(deep, len(cores or (1,)))
        self.plain_setting: EngineSetup = with_lookahead(plain, 1)

    def _chunk(self) -> int:
        """Prompt tokens prefilled between two decode steps: the engine's limit, but all where prefill takes no time."""
        from fathomlm.lab.simulate.simulation import CHUNK

        free = not self.costs.of_prefill(1) and not self.plain_costs.of_prefill(1)
        return max(CHUNK, sum(one.prompt for one in self.sequences.sequences)) if free else CHUNK


def _some(rows: int) -> list[int]:
    """Batch sizes to measure at: the one that is used, half of it, and one alone."""
    return sorted({1, max(1, rows // 2), rows})


def table(record: dict[str, Any]) -> list[list[str]]:
    rows = [["batching", "batch", "tokens/s", "filled", "Delta_V", "Delta_Seq", "time"]]
    for name, shown in {"vanilla": "vanilla", "sequence": "sequence-wise", "depth": "depth-wise"}.items():
        found = record[name]
        speed = found["tokens_per_s"]
        stages = ", ".join(f"{stage} {share:.0%}" for stage, share in found["stages"].items())
        against = [f"x{speed / record[base]['tokens_per_s']:.2f}" for base in ("vanilla", "sequence")]
        rows.append([shown, str(found["batch_size"]), f"{speed:,.0f}", f"{found['batch_filled']:.1%}", *against, stages])
    return rows


def title(record: dict[str, Any]) -> str:
    depth = record["sequences"]
    return (
        f"{depth['sequences']:,} sequences, {depth['tokens']:,} tokens, "
        f"mean depth {depth['mean_depth']:.3f} of {depth['deepest']} "
        f"({depth['label']}). Times: {record['costs']}; linear between batch sizes. "
        f"Deeper keys and values: {record['fill']}"
    )


def write_simulation(out: Path, record: dict[str, Any]) -> list[str]:
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
