"""Predicted against measured: the same workload through the engine and through its simulated twin.

Each round first runs a few other sequences to measure passes and host time, simulates the workload with that, and then runs
it. Machines have slow minutes; the two halves of a round share theirs, and of all rounds the median counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fathomlm.checkpoints.resolve import describe, dtype_name
from fathomlm.cli.common import memory_errors
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.errors import OptionError
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import planned_shape
from fathomlm.lab.bench.play import play, warm_up
from fathomlm.lab.bench.report import about
from fathomlm.lab.bench.run import LOWER, Bench
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.devices import Device, ExitDevice, LoopDevice, PlainDevice
from fathomlm.lab.simulate.measured import calibrate
from fathomlm.lab.simulate.options import Validate
from fathomlm.lab.simulate.simulation import EngineSetup, Simulation, SimulationResult
from fathomlm.lab.simulate.trajectories import draw

ROUNDS = 5
CALIBRATED = 0.5
"""The part of a workload's sequences, at least two for each slot, that a round is calibrated with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRound:
    predicted: SimulationResult
    measured: Timing
    decode_steps: int
    """That the engine took."""

    @property
    def ratio(self) -> float:
        return self.predicted.tokens_per_s / (self.measured.tokens_per_s or float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    rounds: tuple[ValidationRound, ...]
    kind: str
    """The engine's program."""
    parts: tuple[float, ...]
    """Of all tokens that run each depth: forced."""

    @property
    def ratio(self) -> float:
        """Predicted over measured tokens a second, the median of the rounds'."""
        return median(one.ratio for one in self.rounds)

    @property
    def predicted(self) -> float:
        return median(one.predicted.tokens_per_s for one in self.rounds)

    @property
    def measured(self) -> float:
        return median(one.measured.tokens_per_s or 0.0 for one in self.rounds)

    @property
    def decode_steps(self) -> tuple[float, float]:
        """Predicted and measured."""
        return median(one.predicted.decode_steps for one in self.rounds), median(one.decode_steps for one in self.rounds)

    def record(self) -> dict[str, Any]:
        return {
            "program": self.kind,
            "depth": f"forced: parts {', '.join(f'{part:.4g}' for part in self.parts)} of all tokens run each depth",
            "predicted_tokens_per_s": self.predicted,
            "measured_tokens_per_s": self.measured,
            "ratio": self.ratio,
            "ratios": [one.ratio for one in self.rounds],
            "predicted_decode_steps": self.decode_steps[0],
            "measured_decode_steps": self.decode_steps[1],
            "stages": self.rounds[-1].predicted.shares,
        }


def mirror(engine: Engine) -> tuple[Device, EngineSetup]:
    """The simulated twin of an engine: the same program, batch size, sequences, pages, bursts and lag."""
    runner, options = engine.runner, engine.options
    sizes, plan, layout = runner.sizes, runner.decoder.plan, runner.layout
    setting = EngineSetup(
        max_sequences=sizes.max_sequences, tables=sizes.tables, pool_pages=sizes.pool_pages, page_size=options.page_size,
        prefill_chunk=sizes.prefill_chunk, burst=sizes.burst, lag=sizes.lag, lookahead=sizes.lookahead,
    )  # fmt: skip
    program = runner.program
    if isinstance(program, RoutedProgram):
        own = plan.kv == "cache"
        outer = own and len(layout.tables) > plan.recursions
        return LoopDevice(options.batch_size, program.cores, recursions=plan.recursions, own=own, outer=outer), setting
    if isinstance(program, ExitProgram):
        if len(program.exits) > 1 or isinstance(program, DraftProgram):
            raise OptionError("only engines with one exit and no drafts are simulated")
        return ExitDevice(
            options.batch_size, mixed=program.mixed, stack=program.stack, waits=program.deepest > 0,
            shallows=program.passes.count("shallow"),
        ), setting  # fmt: skip
    return PlainDevice(options.batch_size), setting


def deepest_of(engine: Engine) -> int:
    """How deep a trajectory of this engine may go: recursions of a routed model, before and behind an exit, or 1."""
    kinds = {"whole": 1, "exits": 2, "routed": engine.runner.decoder.plan.recursions}
    return kinds[engine.runner.layout.kind]


def forced_parts(engine: TimedEngine) -> tuple[float, ...]:
    """What the engine's options force, by depth."""
    options, kind = engine.options, engine.runner.layout.kind
    if kind == "routed":
        assert options.forced_depths is not None, "depths are forced"
        return tuple(options.forced_depths)
    if kind == "exits":
        assert options.forced_exits is not None, "exits are forced"
        return (1.0, 1.0 - options.forced_exits) if options.forced_exits < 1 else (1.0,)
    return (1.0,)


def validate(engine: TimedEngine, workload: Workload, rounds: int = ROUNDS, on_round: OnProgress = unwatched) -> Validation:
    """Some rounds; `on_round` is called with (done, total)."""
    parts = forced_parts(engine)
    warm_up(engine, workload)
    found = []
    for number in range(rounds):
        found.append(_round(engine, workload, parts, seed=number))
        on_round(number + 1, rounds)
    return Validation(rounds=tuple(found), kind=engine.runner.layout.kind, parts=parts)


def _round(engine: TimedEngine, workload: Workload, parts: Sequence[float], seed: int) -> ValidationRound:
    count = max(int(CALIBRATED * len(workload.requests)), 2 * engine.runner.sizes.max_sequences)
    longest = max(request.new for request in workload.requests)
    costs = calibrate(engine, workload.shortened(count, longest))
    device, setting = mirror(engine)
    lengths = [(len(request.prompt), request.new) for request in workload.requests]
    trajectories = draw(lengths, parts, seed)
    deepest = deepest_of(engine)
    assert trajectories.deepest <= deepest, "no deeper than the engine's"
    predicted = Simulation(device, setting, costs, trajectories).run()
    played = play(engine, workload)
    if played.interrupted:
        raise KeyboardInterrupt
    decode_steps = engine.totals.decode_steps
    engine.forget()
    return ValidationRound(predicted=predicted, measured=Timing.of(played), decode_steps=decode_steps)


def run(options: Validate) -> int:
    if options.depth.depth in ("router", "confidence") or options.depth.threshold is not None:
        raise OptionError("a validation forces depths, so that both know them: give --depths or --exit-rate")
    forced = options.depth
    if forced.depth is None and forced.exit_rate is None and planned_shape(options, options.model)[1].routing is not None:
        forced = replace(forced, depth="forced")
    with memory_errors(LOWER):
        return _validate(replace(options, depth=forced))


def _validate(options: Validate) -> int:
    bench = Bench(options)
    if bench.depth.source not in ("full", "forced"):
        raise OptionError("a validation forces depths, so that both know them: give --exit-rate P")
    settings = replace(bench.engine_options(bench.model, bench.depth), prefix_caching=False)
    engine = TimedEngine(bench.model, settings, exiting=bench.depth.exiting)
    engine.fix_bursts()  # the simulated twin's are
    with progress_bar("validating", unit="rounds") as update:
        found = validate(engine, bench.workload, options.rounds, update).record()
    record: dict[str, Any] = about(options, dtype_name(bench.model)) | {
        "plan": describe(bench.model),
        "workload": bench.workload.record(),
        "batch_size": settings.batch_size,
        "max_sequences": engine.runner.sizes.max_sequences,
        **found,
    }
    options.answer(record, _print)
    within = options.within
    return 1 if within is not None and abs(record["ratio"] - 1) > within else 0


def _print(record: dict[str, Any]) -> None:
    rows = [["", "predicted", "measured", "predicted / measured"]]
    speeds = record["predicted_tokens_per_s"], record["measured_tokens_per_s"]
    decode_steps = record["predicted_decode_steps"], record["measured_decode_steps"]
    rows.append(["tokens/s", *(f"{speed:,.1f}" for speed in speeds), f"{record['ratio']:.3f}"])
    rows.append(["decode steps", *(f"{many:,.0f}" for many in decode_steps), f"{decode_steps[0] / decode_steps[1]:.3f}"])
    print_table(rows, f"{record['plan']}, {record['device']}; {record['depth']}; medians of {len(record['ratios'])} rounds")
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in record["stages"].items())
    print(f"predicted time: {shares}")
