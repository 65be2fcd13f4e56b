"""`fathomlm simulate [throughput] [MODEL]`: three ways to batch the same sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from fathomlm import __version__
from fathomlm.checkpoints.resolve import decoder_only, parse_device
from fathomlm.checkpoints.writing import make_directories, whole_file
from fathomlm.cli.common import memory_errors
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.presets import PRESETS
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine.core_passes import passes_for
from fathomlm.errors import OptionError, writing
from fathomlm.lab.bench.models import dummy_dtype, planned_shape
from fathomlm.lab.bench.options import PlannedModelOptions
from fathomlm.lab.bench.workload import build_workload
from fathomlm.lab.drawing import LINES, check_matplotlib, figure_over_table, plain_axes, save_figure
from fathomlm.lab.simulate.collect import ExitRule, collect
from fathomlm.lab.simulate.costs import Costs, read_costs
from fathomlm.lab.simulate.devices import Device, LoopDevice
from fathomlm.lab.simulate.measured import MeasuredShape, measure_loop, measure_plain
from fathomlm.lab.simulate.options import BATCH, TOKENS, SequenceOptions, SimulateThroughput
from fathomlm.lab.simulate.policies import Comparison, compare, loop_device, with_lookahead
from fathomlm.lab.simulate.simulation import CHUNK, EngineSetup, MemoryFit, fit_memory
from fathomlm.lab.simulate.thesis import PresetTimes, looped_preset, plain_of, preset_costs
from fathomlm.lab.simulate.trajectories import Trajectories, draw, read_trajectories, write_trajectories
from fathomlm.lab.token_rows import find, read_rows, row_length

WIDEST = 76
"""Characters of a line of the title."""
NAMES = {"vanilla": "vanilla", "sequence": "sequence-wise", "depth": "depth-wise"}


def run(options: SimulateThroughput) -> int:
    source = read_sequences(options.sequences, options, options.model)
    if options.sequences.save is not None:
        write_trajectories(options.sequences.save, source.trajectories)
    simulated = _Simulated(options, source)
    record = simulated.record(simulated.compare())
    if options.out is not None:
        record["files"] = write_simulation(options.out, record)
    return options.answer(record, _show)


def _show(record: dict[str, Any]) -> None:
    print_table(table(record), title(record))
    for note in record["notes"]:
        print(note)
    for file in record.get("files", []):
        print(f"wrote {file}")


@dataclass(frozen=True, slots=True)
class SimulationSource:
    """The sequences, and the model that they are of, where there is one."""

    trajectories: Trajectories
    architecture: Architecture | None = None
    plan: DepthPlan | None = None
    relaxation: Relaxation | None = None

    def planned(self, times: PresetTimes | None) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The model that is asked for, or the preset's."""
        if self.architecture is not None:
            assert self.plan is not None
            return self.architecture, self.plan, self.relaxation
        assert times is not None
        architecture = PRESETS[times.model].architecture
        plan = DepthPlan.build("cycle", times.blocks, architecture.layers, "add")
        return architecture, plan, build_relaxation(architecture.linears(), "lora", times.rank) if times.rank else None

    def shape(self, options: PlannedModelOptions) -> MeasuredShape:
        device, (architecture, plan, relaxation) = parse_device(options.device), self.planned(None)
        return MeasuredShape(
            architecture=architecture, plan=plan, relaxation=relaxation, dtype=dummy_dtype(options, device), device=device
        )


def read_sequences(wanted: SequenceOptions, options: PlannedModelOptions, model: str | None) -> SimulationSource:
    options.use_threads()
    if wanted.data:
        assert model is not None
        return _through_model(wanted, options, model)
    found: tuple[Any, ...] = () if model is None else planned_shape(options, model)
    deepest = found[1].recursions if found else None
    if wanted.trajectories is not None:
        return SimulationSource(read_trajectories(wanted.trajectories, deepest), *found)
    parts = wanted.depths or (1.0,)
    if deepest is not None and len(parts) != deepest:
        raise OptionError(f"--depths has {len(parts)} parts, but the model has {deepest} recursions")
    return SimulationSource(_drawn(wanted, parts, options.seed), *found)


def _drawn(wanted: SequenceOptions, parts: tuple[float, ...], seed: int) -> Trajectories:
    workload = build_workload(wanted.workload or "thesis", 2, requests=wanted.requests, seed=seed)
    return draw(((len(request.prompt), request.new) for request in workload.requests), parts, seed)


def _through_model(wanted: SequenceOptions, options: PlannedModelOptions, name: str) -> SimulationSource:
    if options.replanned:
        raise OptionError("--data runs text through MODEL as it is; make another with `fathomlm convert` first")
    places = find(wanted.data)
    model = decoder_only(options.load_source(name), "this command")
    tokens = row_length(model, wanted.tokens, most=TOKENS)
    rows = read_rows(places, model, context=tokens, rows=wanted.sequences, column=wanted.column)
    exit_rule: ExitRule = wanted.depth or ("router" if model.plan.routing is not None else "oracle")
    with progress_bar("prefill", unit="sequences") as update:
        found = collect(
            model, rows.tokens_NT, exit_rule=exit_rule, threshold=wanted.threshold, layers=wanted.exit_layers,
            prompt=wanted.prompt_tokens, on_rows=update,
        )  # fmt: skip
    return SimulationSource(found, model.architecture, model.plan, model.relaxation)


class _Simulated:
    """The three simulations that the options ask for."""

    def __init__(self, options: SimulateThroughput, source: SimulationSource) -> None:
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
        with progress_bar("simulating", unit="tokens") as update:
            return compare(
                self.sequences, self.costs, plain=self.plain_setting, deep=self.setting, device=self.device,
                plain_costs=self.plain_costs, waiting=self.options.batching.waiting, on_progress=update,
            )  # fmt: skip

    def record(self, comparison: Comparison) -> dict[str, Any]:
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
        if self.times is not None:
            found = preset_costs(self.times, self.options.costs.ends)
            return found, found
        if self.options.costs.costs is not None:
            found = read_costs(self.options.costs.costs, self.sequences.deepest)
            return found, found
        return self._measure()

    def _measure(self) -> tuple[Costs, Costs]:
        shape = self.source.shape(self.options)
        with memory_errors("--batch-size or --context"), progress_bar("measuring", unit="batch sizes") as update:
            plain = measure_plain(shape, _some(self.plain_batch_size), self.options.costs.context, update)
            return measure_loop(shape, _some(self.batch_size), self.options.costs.context, update), plain

    def _memory_fits(self) -> tuple[MemoryFit, MemoryFit] | None:
        """What fits the memory of the plain model and of this one."""
        if self.options.batching.gpu_memory is None:
            return None

        architecture, plan, relaxation = self.source.planned(self.times)
        fields = {"memory": self.options.batching.gpu_memory, "length": self.sequences.longest}
        plain = architecture.with_layers(tuple(step.origin for step in plan))
        return (
            fit_memory(plain, DepthPlan.vanilla(plain.layers), None, **fields),
            fit_memory(architecture, plan, relaxation, **fields),
        )

    def _settle(self, rooms: tuple[MemoryFit, MemoryFit] | None) -> None:
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
        free = not self.costs.of_prefill(1) and not self.plain_costs.of_prefill(1)
        return max(CHUNK, sum(one.prompt for one in self.sequences.sequences)) if free else CHUNK


def _some(rows: int) -> list[int]:
    """Batch sizes to measure at: the one that is used, half of it, and one alone."""
    return sorted({1, max(1, rows // 2), rows})


def table(record: dict[str, Any]) -> list[list[str]]:
    rows = [["batching", "batch", "tokens/s", "filled", "Delta_V", "Delta_Seq", "time"]]
    for name, shown in NAMES.items():
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
    with writing(out):
        make_directories(out)
    with whole_file(out / "simulation.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    try:
        check_matplotlib()
    except OptionError:
        return [str(out / "simulation.json")]
    draw_simulation(record, out / "simulation.png")
    return [str(out / name) for name in ("simulation.json", "simulation.png")]


def draw_simulation(record: dict[str, Any], out: Path) -> None:
    """Tokens a second of the three ways, with what each bar stands for beside it."""
    colours = LINES[: len(NAMES)]
    shown = [[row[0], row[1], row[3], row[4], row[5]] for row in table(record)[1:]]
    rows = [["batching", "batch size", "filled", "against vanilla", "against sequence-wise"], *shown]
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
