"""`fathomlm simulate validate MODEL`: predicted against measured throughput of one workload on this device."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from fathomlm.cli.device import memory_errors
from fathomlm.cli.progress import layer_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.bench_engine import LOWER, Bench
from fathomlm.lab.cli.bench_options import (
    add_depth_arguments,
    add_engine_arguments,
    add_source_arguments,
    add_workload_arguments,
)
from fathomlm.lab.cli.bench_record import about, print_record
from fathomlm.lab.tables import print_table

HELP = "predicted against measured: the same workload simulated and run by the engine"
DESCRIPTION = (
    "Measures what passes, prompts and the host take, simulates a workload with that, runs it with the engine, and says how "
    "far apart the two are. Depths are forced: --depths with a router, --exit-rate without; a plain model has none."
)
REQUESTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    add_workload_arguments(parser, "thesis", REQUESTS)
    engine = add_engine_arguments(parser)
    engine.add_argument("--rows", metavar="N", type=int, default=32, help="tokens of a pass (32)")
    engine.add_argument("--slots", metavar="N", type=int, help="texts in flight (rows; twice that where depths differ)")
    add_depth_arguments(parser)
    add = parser.add_argument
    add("--rounds", metavar="N", type=int, default=5, help="times to measure, simulate and run; the median counts (5)")
    add(
        "--within",
        metavar="P",
        type=float,
        help="exit with code 1 where the two differ by more than this part, such as 0.15",
    )
    parser.set_defaults(peer=[], arrivals=None)


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise OptionError(f"--rounds must be >= 1, got {args.rounds}")
    if args.within is not None and not (math.isfinite(args.within) and args.within > 0):
        raise OptionError(f"--within must be > 0, such as 0.15; got {args.within:g}")
    if args.depth in ("router", "confidence") or args.threshold is not None:
        raise OptionError("a validation forces depths, so that both know them: give --depths or --exit-rate")
    with memory_errors(LOWER):
        return _Validate(args).run()


class _Validate(Bench):
    """`bench throughput` with a prediction in front of each measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        from fathomlm.lab.cli.bench_model import read_shape

        if args.depth is None and args.exit_rate is None and read_shape(args)[1].routing is not None:
            args.depth = "forced"
        super().__init__(args)
        if self.depth.choice.source not in ("full", "forced"):
            raise OptionError("a validation forces depths, so that both know them: give --exit-rate P")

    def run(self) -> int:
        from fathomlm.checkpoints.resolve import describe, dtype_name
        from fathomlm.lab.bench.timed import TimedEngine
        from fathomlm.lab.simulate.validate import validate

        options = replace(self._options(self.model, self.depth, None), prefix_caching=False)
        engine = TimedEngine(self.model, options, exiting=self.depth.exiting)
        with layer_bar("validating", unit="rounds") as tell:
            found = validate(engine, self.workload, self.args.rounds, tell).record()
        record: dict[str, Any] = about(self.args, dtype_name(self.model)) | {
            "plan": describe(self.model),
            "workload": self.workload.record(),
            "batch_size": options.batch_size,
            "max_sequences": engine.runner.sizes.max_sequences,
            **found,
        }
        if self.args.json:
            print_record(record)
        else:
            _print(record)
        within = self.args.within
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
