"""`fathomlm simulate validate MODEL`: predicted against measured throughput of one workload on this device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fathomlm.cli.common import memory_errors
from fathomlm.cli.progress import progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.bench import LOWER, EngineBenchOptions
from fathomlm.lab.cli.bench_setup import WorkloadOptions
from fathomlm.lab.cli.eval_common import answer
from fathomlm.lab.tables import print_table
from fathomlm.options import option, section


@dataclass(frozen=True, kw_only=True)
class Validate(EngineBenchOptions):
    """Measure what passes, prompts and the host take, simulate a workload with that, run it with the engine, and report how
    far apart the two are. Depths are forced: --depths with a router, --exit-rate without; a plain model has none."""

    kind = "validate"
    workload: WorkloadOptions = section(WorkloadOptions, "workload", requests=64)
    rounds: int = option(5, ge=1, help="how often to measure, simulate and run; the median counts")
    within: float | None = option(
        None, gt=0, metavar="P", help="exit with code 1 where the two differ by more than this part, such as 0.15"
    )
    peer: tuple[str, ...] = ()

    def run(self) -> int:
        if self.depth.depth in ("router", "confidence") or self.depth.threshold is not None:
            raise OptionError("a validation forces depths, so that both know them: give --depths or --exit-rate")
        forced = self.depth
        if forced.depth is None and forced.exit_rate is None and self.shape(self.model)[1].routing is not None:
            forced = replace(forced, depth="forced")
        with memory_errors(LOWER):
            return _validate(replace(self, depth=forced))


def _validate(options: Validate) -> int:
    from fathomlm.checkpoints.resolve import describe, dtype_name
    from fathomlm.lab.bench.timed import TimedEngine
    from fathomlm.lab.cli.bench_engine import Bench, about
    from fathomlm.lab.simulate.validate import validate

    bench = Bench(options)
    if bench.depth.choice.source not in ("full", "forced"):
        raise OptionError("a validation forces depths, so that both know them: give --exit-rate P")
    settings = replace(bench.engine_options(bench.model, bench.depth), prefix_caching=False)
    engine = TimedEngine(bench.model, settings, exiting=bench.depth.exiting)
    with progress_bar("validating", unit="rounds") as update:
        found = validate(engine, bench.workload, options.rounds, update).record()
    record: dict[str, Any] = about(options, dtype_name(bench.model)) | {
        "plan": describe(bench.model),
        "workload": bench.workload.record(),
        "batch_size": settings.batch_size,
        "max_sequences": engine.runner.sizes.max_sequences,
        **found,
    }
    answer(options, record, _print)
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
