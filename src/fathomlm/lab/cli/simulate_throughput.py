"""`fathomlm simulate [throughput] [MODEL]`: three ways to batch over the same texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.plan_options import add_plan_arguments, add_relax_arguments, add_router_arguments
from fathomlm.cli.sampling_options import add_dtype_argument
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_options import print_record
from fathomlm.lab.cli.simulate_sources import SimulationSource, add_text_arguments, check_texts, read_source
from fathomlm.lab.simulate.policies import FILLS, WAITINGS
from fathomlm.lab.tables import print_table
from fathomlm.sizes import parse_memory

if TYPE_CHECKING:
    from fathomlm.lab.simulate.costs import Costs
    from fathomlm.lab.simulate.devices import Device
    from fathomlm.lab.simulate.policies import Comparison
    from fathomlm.lab.simulate.simulation import EngineSetup, MemoryFit
    from fathomlm.lab.simulate.trajectories import Trajectories

HELP = "vanilla, continuous sequence-wise and continuous depth-wise batching over the same texts"
DESCRIPTION = (
    "Needs to know how deep tokens go (--trajectories, --depths, or --data through MODEL) and how long passes take "
    "(--preset, --costs or --measure). Texts are all there from the start. The plain model is the baseline: without and "
    "with sequence-wise batching. The last two ways run the engine's scheduler and page pool, with a clock for a device."
)
ROWS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "the model: for --data and --measure, and for --memory without a preset"
    add("model", metavar="MODEL", nargs="?", help=model)
    add("--dummy", action="store_true", help="random weights for --measure: only MODEL's configuration is read")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)
    add("--seed", metavar="N", type=int, default=0, help="of what is drawn (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="also write simulation.json, and simulation.png where matplotlib is installed",
    )
    add_text_arguments(parser)
    add = parser.add_argument_group("how long passes take").add_argument
    add("--preset", metavar="NAME", help="the thesis' A100: 40gb/gemma-2b/2, 16gb/pythia-1b/2/64 (table/model/blocks/rank)")
    add("--ends", action="store_true", help="--preset: count embedding and head, which the thesis leaves out")
    add("--costs", metavar="FILE", type=Path, help="a table of milliseconds by rows (JSON or YAML)")
    add("--measure", action="store_true", help="time the engine's own passes of MODEL on this device, random weights")
    add("--context", metavar="T", type=int, default=256, help="--measure: entries that rows look at (256)")
    add = parser.add_argument_group("the batches").add_argument
    add("--rows", metavar="N", type=int, help=f"tokens of a pass (the preset's largest batch, or {ROWS})")
    add("--plain-rows", metavar="N", type=int, help="of the plain model (its preset's largest batch, or as many)")
    add("--slots", metavar="N", type=int, help="texts in flight, depth-wise (as many as rows; --measure: twice that)")
    add("--memory", metavar="SIZE", help="of the device, weights and keys and values: 16GB; no more texts than fit")
    fill = "deeper keys and values of a token that left: free, as in the thesis, or exact, as the engine makes them (free)"
    add("--fill", metavar="HOW", choices=FILLS, default="free", help=fill)
    wait = "vanilla: a batch whose texts end takes the time of those left (shrink, as in the thesis) or as before (pad)"
    add("--waiting", metavar="HOW", choices=WAITINGS, default="shrink", help=wait)
    add_plan_arguments(parser)
    add_relax_arguments(parser)
    add_router_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    source = read_source(args)
    if args.save is not None:
        from fathomlm.lab.simulate.trajectories import write_trajectories

        write_trajectories(args.save, source.trajectories)
    simulated = _Simulated(args, source)
    comparison = simulated.compare()
    record = simulated.record(comparison)
    if args.out is not None:
        from fathomlm.lab.cli.simulate_picture import write_simulation

        record["files"] = write_simulation(args.out, record)
    if args.json:
        print_record(record)
        return 0
    print_table(table(record), title(record))
    for note in record["notes"]:
        print(note)
    for file in record.get("files", []):
        print(f"written: {file}")
    return 0


def _check(args: argparse.Namespace) -> None:
    chosen = [name for name in ("preset", "costs", "measure") if getattr(args, name)]
    if len(chosen) != 1:
        raise OptionError("say how long passes take with one of --preset NAME, --costs FILE and --measure")
    if args.measure and args.model is None:
        raise OptionError("--measure needs a MODEL, such as smollm-135m --dummy --recursions 3")
    if args.ends and args.preset is None:
        raise OptionError("--ends goes with --preset: other tables say themselves what they count")
    if args.fill == "exact" and args.measure:
        raise OptionError(
            "--fill exact goes with --preset or --costs; `simulate validate` measures exits as the engine has them"
        )
    if args.memory is not None and args.model is None and args.preset is None:
        raise OptionError("--memory needs a MODEL or a --preset, whose weights, keys and values are counted")
    for name in ("rows", "plain_rows", "slots", "context", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be >= 1, got {value}")
    check_texts(args)


class _Simulated:
    """The three simulations that the options ask for."""

    def __init__(self, args: argparse.Namespace, source: SimulationSource) -> None:
        from fathomlm.lab.simulate.presets import looped_preset, plain_of

        self.args, self.source = args, source
        self.sequences: Trajectories = source.trajectories
        self.notes: list[str] = []
        times = None if args.preset is None else looped_preset(args.preset)
        if times is not None and times.blocks != self.sequences.deepest:
            raise OptionError(
                f"preset '{args.preset}' loops its block {times.blocks} times, but the tokens' depths go up to "
                f"{self.sequences.deepest}"
            )
        self.times = times
        rooms = self._memory_fits()
        self.batch_size = args.rows or self._fitting(rooms and rooms[1], None if times is None else times.batch)
        same = self.batch_size if times is None and rooms is None else None
        plain = None if times is None else plain_of(times).batch
        self.plain_batch_size = args.plain_rows or same or self._fitting(rooms and rooms[0], plain)
        self.max_sequences = args.slots or (2 * self.batch_size if args.measure else self.batch_size)
        self.costs, self.plain_costs = self._read_costs()
        self._settle(rooms)

    def _fitting(self, room: MemoryFit | None, measured: int | None) -> int:
        """As many rows as fit and were measured."""
        known = [rows for rows in (room and room.sequences, measured) if rows]
        return min(known) if known else ROWS

    def compare(self) -> Comparison:
        from fathomlm.cli.progress import layer_bar
        from fathomlm.lab.simulate.policies import compare

        with layer_bar("simulating", unit="tokens") as tell:
            return compare(
                self.sequences, self.costs, plain=self.plain_setting, deep=self.setting, device=self.device,
                plain_costs=self.plain_costs, waiting=self.args.waiting, on_progress=tell,
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
            "waiting": self.args.waiting,
            "model": self.args.model,
            "preset": self.args.preset,
            "memory": None if self.args.memory is None else parse_memory(self.args.memory),
            **comparison.record(),
            "notes": self.notes,
        }

    def _fill(self) -> str:
        routed = self.source.plan is not None and self.source.plan.routing is not None
        return "none needed: a routed model has no entries at depths that were not run" if routed else self.args.fill

    def _read_costs(self) -> tuple[Costs, Costs]:
        from fathomlm.lab.simulate.costs import read_costs
        from fathomlm.lab.simulate.presets import preset_costs

        if self.times is not None:
            found = preset_costs(self.times, self.args.ends)
            return found, found
        if self.args.costs is not None:
            found = read_costs(self.args.costs, self.sequences.deepest)
            return found, found
        return self._measure()

    def _measure(self) -> tuple[Costs, Costs]:
        from fathomlm.cli.device import memory_errors
        from fathomlm.cli.progress import layer_bar
        from fathomlm.lab.simulate.measured import MeasuredShape, measure_loop, measure_plain

        shape = MeasuredShape(**self.source.shape(self.args))
        with memory_errors("--rows or --context"), layer_bar("measuring", unit="row counts") as tell:
            plain = measure_plain(shape, _some(self.plain_batch_size), self.args.context, tell)
            return measure_loop(shape, _some(self.batch_size), self.args.context, tell), plain

    def _memory_fits(self) -> tuple[MemoryFit, MemoryFit] | None:
        """What fits the memory of the plain model and of this one."""
        if self.args.memory is None:
            return None
        from fathomlm.depth import DepthPlan
        from fathomlm.lab.simulate.simulation import fit_memory

        architecture, plan, relaxation = self.source.planned(self.times)
        fields = {"memory": parse_memory(self.args.memory), "length": self.sequences.longest}
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
        cores = passes_for(self.sequences.mean_depth) if self.args.measure else None
        tables: tuple[int, ...] = (0,)
        if own:
            tables = (*((0,) if outer else ()), *[int(outer)] * self.sequences.deepest)
            self.device: Device = LoopDevice(
                self.batch_size, cores or (1,), recursions=self.sequences.deepest, own=True, outer=outer
            )
        else:
            self.device = loop_device(self.sequences, self.batch_size, self.args.fill, cores)
        pages = None if rooms is None else rooms[1].pool_pages
        plain_pages = None if rooms is None else rooms[0].pool_pages
        chunk = self._chunk()
        deep = EngineSetup(max_sequences=self.max_sequences, tables=tables, pool_pages=pages, prefill_chunk=chunk)
        plain = EngineSetup(max_sequences=self.plain_batch_size, pool_pages=plain_pages, prefill_chunk=chunk)
        self.setting: EngineSetup = with_lookahead(deep, len(cores or (1,)))
        self.plain_setting: EngineSetup = with_lookahead(plain, 1)

    def _chunk(self) -> int:
        """Prompt tokens that are read between two decode_steps: the engine's limit, but all where reading takes no time."""
        from fathomlm.lab.simulate.simulation import CHUNK

        free = not self.costs.of_prefill(1) and not self.plain_costs.of_prefill(1)
        return max(CHUNK, sum(one.prompt for one in self.sequences.sequences)) if free else CHUNK


def _some(rows: int) -> list[int]:
    """Numbers of rows to measure at: the one that is used, half of it, and one alone."""
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
