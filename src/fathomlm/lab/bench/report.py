"""What benchmarks say of themselves: how a record begins, and the table of one. Tables have units in every row, and "forced"
wherever depths were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fathomlm.cli.display import print_table
from fathomlm.lab.bench.options import EngineBenchOptions, Kernels
from fathomlm.lab.common import environment
from fathomlm.sizes import amount

Found = dict[str, Any]
Row = tuple[str, Callable[[Found], str | None]]
"""Its name, and what it says of one column; None where that has no such thing."""


def about(options: EngineBenchOptions | Kernels, dtype: str) -> dict[str, Any]:
    """How every record begins."""
    return {
        "kind": options.kind,
        "model": options.model,
        "dtype": dtype,
        "device": options.device,
        "environment": environment(options.device),
    }


def tell_interrupted() -> None:
    print("fathomlm: interrupted; this is what was measured so far", file=sys.stderr)


def print_bench(record: Found) -> None:
    ours = record["ours"]
    forced = ours["depth"]["source"] == "forced"
    columns = {f"this model{' (forced)' if forced else ''}": ours, **record["peers"]}
    present = [row for row in (*ROWS, *_stage_rows(ours)) if any(row[1](found) is not None for found in columns.values())]
    rows = [[name, *(format_value(found) or "-" for found in columns.values())] for name, format_value in present]
    print_table([["", *columns], *rows], _title(record), caption=_caption(record))


def _title(record: Found) -> str:
    workload = record["workload"]
    many = f"{workload['requests']:,} request{'s' if workload['requests'] > 1 else ''}"
    when = f"{workload['rate_per_s']:g} requests a second" if workload["rate_per_s"] else workload["arrivals"]
    return (
        f"{record['model']}: {record['plan']}, {record['weights']} weights, {record['dtype']}, "
        f"{record['environment']['device']}\n"
        f"workload {workload['name']}: {many}, {workload['prompt_tokens']:,} prompt and "
        f"{workload['new_tokens']:,} new tokens, {when}"
    )


def _caption(record: Found) -> str:
    ours = record["ours"]
    speed = amount(ours["floor"]["reading_bytes_per_s"], "B/s")
    lines = [
        f"Depth: {ours['depth']['label']}.",
        f"The floor is the time that reading a decode step's weights takes at {speed}, this device's own reading speed.",
    ]
    if ours["timing"]["failed"]:
        lines.append(f"{ours['timing']['failed']} requests failed: {ours['timing']['error']}.")
    for name, peer in record["peers"].items():
        if "cannot" in peer:
            lines.append(f"{name} was not measured: {peer['cannot']}.")
        elif "workload" in peer:
            few = peer["workload"]
            lines.append(
                f"{name}: {peer['how']}, {few['requests']} requests of {few['new_tokens'] // few['requests']} tokens."
            )
    return "\n".join(lines)


def _part(part: str, name: str, format_value: Callable[[Any], str]) -> Callable[[Found], str | None]:
    def cell(found: Found) -> str | None:
        value = found.get(part, {}).get(name)
        return None if value is None else format_value(value)

    return cell


def percent(value: float) -> str:
    return f"{value:.1%}"


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _spread(times: dict[str, float]) -> str:
    return f"{ms(times['p50'])} / {ms(times['p99'])}"


def _depth(found: Found) -> str | None:
    depth = found.get("depth")
    if depth is None or depth["mean"] is None:
        return None
    return f"{depth['mean']:.2f} of {depth['full']} {depth['unit']}"


def _exit_rate(found: Found) -> str | None:
    depth = found.get("depth")
    return None if depth is None or depth["source"] == "full" or depth["exit_rate"] is None else percent(depth["exit_rate"])


def _against(found: Found) -> str | None:
    speedup = found.get("speedup")
    return None if speedup is None else f"{speedup:.2f} x"


ROWS: Sequence[Row] = (
    ("milliseconds a token, mean", _part("latency", "ms_per_token", ms)),
    ("  p50", _part("latency", "ms_per_token_p50", ms)),
    ("  p99", _part("latency", "ms_per_token_p99", ms)),
    ("  floor", _part("latency", "floor_ms_per_token", ms)),
    ("  floor's share", _part("latency", "floor_share", percent)),
    ("tokens/s", _part("timing", "tokens_per_s", lambda value: f"{value:,.1f}")),
    ("this model is faster by", _against),
    ("tokens", _part("timing", "tokens", lambda value: f"{value:,}")),
    ("time to first token p50 / p99, ms", _part("timing", "time_to_first_token_ms", _spread)),
    ("between tokens p50 / p99, ms", _part("timing", "inter_token_ms", _spread)),
    ("mean depth", _depth),
    ("tokens that stopped early", _exit_rate),
    ("batch size", _part("work", "batch_size", str)),
    ("max concurrent sequences", _part("work", "max_sequences", str)),
    ("batch filled", _part("work", "batch_filled", percent)),
    ("put aside for want of memory", _part("work", "preemptions", lambda value: f"{value:,}")),
    ("decode step, ms", _part("work", "ms_per_decode_step", ms)),
    ("  floor, ms", _part("floor", "ms_per_decode_step", ms)),
    ("  floor's share", _part("floor", "share", percent)),
    ("weights", _part("memory", "weights", lambda value: amount(value, "B"))),
    ("keys and values, held", _part("memory", "kv", lambda value: amount(value, "B"))),
    ("  used at most", _part("memory", "kv_most", lambda value: amount(value, "B"))),
    ("  in", _part("memory", "kv_dtype", lambda value: str(value).partition("_")[0])),
)


def _stage_rows(ours: Found) -> list[Row]:
    def row(stage: str) -> Row:
        def cell(found: Found) -> str | None:
            share = found.get("work", {}).get("stages", {}).get(stage)
            return None if share is None else percent(share)

        return f"time {stage}", cell

    return [row(stage) for stage in ours["work"]["stages"]]
