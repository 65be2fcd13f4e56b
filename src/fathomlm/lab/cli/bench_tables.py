"""The tables of `bench`, for people: units in every row, and "forced" wherever depths were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fathomlm.lab.tables import print_table
from fathomlm.sizes import amount

Found = dict[str, Any]
Row = tuple[str, Callable[[Found], str | None]]
"""Its name, and what it says of one column; None where that has no such thing."""


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


def _timing(name: str, format_value: Callable[[Any], str]) -> Callable[[Found], str | None]:
    return _part("timing", name, format_value)


def _part(part: str, name: str, format_value: Callable[[Any], str]) -> Callable[[Found], str | None]:
    def cell(found: Found) -> str | None:
        value = found.get(part, {}).get(name)
        return None if value is None else format_value(value)

    return cell


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _spread(times: dict[str, float]) -> str:
    return f"{_ms(times['p50'])} / {_ms(times['p99'])}"


def _depth(found: Found) -> str | None:
    depth = found.get("depth")
    if depth is None or depth["mean"] is None:
        return None
    return f"{depth['mean']:.2f} of {depth['full']} {depth['unit']}"


def _exit_rate(found: Found) -> str | None:
    depth = found.get("depth")
    return None if depth is None or depth["source"] == "full" or depth["exit_rate"] is None else _percent(depth["exit_rate"])


def _against(found: Found) -> str | None:
    speedup = found.get("speedup")
    return None if speedup is None else f"{speedup:.2f} x"


ROWS: Sequence[Row] = (
    ("milliseconds a token, mean", _part("latency", "ms_per_token", _ms)),
    ("  p50", _part("latency", "ms_per_token_p50", _ms)),
    ("  p99", _part("latency", "ms_per_token_p99", _ms)),
    ("  floor", _part("latency", "floor_ms_per_token", _ms)),
    ("  floor's share", _part("latency", "floor_share", _percent)),
    ("tokens/s", _timing("tokens_per_s", lambda value: f"{value:,.1f}")),
    ("this model is faster by", _against),
    ("tokens", _timing("tokens", lambda value: f"{value:,}")),
    ("time to first token p50 / p99, ms", _timing("time_to_first_token_ms", _spread)),
    ("between tokens p50 / p99, ms", _timing("inter_token_ms", _spread)),
    ("mean depth", _depth),
    ("tokens that stopped early", _exit_rate),
    ("batch size", _part("work", "batch_size", str)),
    ("max concurrent sequences", _part("work", "max_sequences", str)),
    ("batch filled", _part("work", "batch_filled", _percent)),
    ("put aside for want of memory", _part("work", "preemptions", lambda value: f"{value:,}")),
    ("decode step, ms", _part("work", "ms_per_decode_step", _ms)),
    ("  floor, ms", _part("floor", "ms_per_decode_step", _ms)),
    ("  floor's share", _part("floor", "share", _percent)),
    ("weights", _part("memory", "weights", lambda value: amount(value, "B"))),
    ("keys and values, held", _part("memory", "kv", lambda value: amount(value, "B"))),
    ("  used at most", _part("memory", "kv_most", lambda value: amount(value, "B"))),
    ("  in", _part("memory", "kv_dtype", lambda value: str(value).partition("_")[0])),
)


def _stage_rows(ours: Found) -> list[Row]:
    def row(stage: str) -> Row:
        def cell(found: Found) -> str | None:
            share = found.get("work", {}).get("stages", {}).get(stage)
            return None if share is None else _percent(share)

        return f"time {stage}", cell

    return [row(stage) for stage in ours["work"]["stages"]]


def print_kernels(record: Found) -> None:
    settings, kernels = record["settings"], record["kernels"]
    absolute = any(one["us"] is not None for one in kernels)
    head = ["kernel", "what for", *(["us", "floor, us"] if absolute else []), "floor's share", "part of a layer"]
    rows = []
    for one in kernels:
        times = [_ms(one["us"]), _ms(one["floor_us"])] if absolute else []
        layer = "-" if one["layer_share"] is None else _percent(one["layer_share"])
        rows.append([one["kernel"], one["use"], *times, _percent(one["floor_share"]), layer])
    title = (
        f"{record['model']}: {settings['rows']} rows, {record['dtype']}, {record['environment']['device']}, "
        f"{record['implementation']}"
    )
    caption = "The floor is reading what a call must read at this device's own reading speed, measured in the same run."
    if not absolute:
        caption = "CPU twin: these say what is right and are not made to be fast, so only ratios are shown. " + caption
    print_table([head, *rows], title, caption=caption, text_columns=2)


def print_host(record: Found) -> None:
    parts = list(next((one["parts_us_per_token"] for one in record["costs"] if one["parts_us_per_token"]), {}))
    rows = []
    for one in record["costs"]:
        inner = one["parts_us_per_token"] or {}
        figures = [one["us_per_token"], *(inner.get(part) for part in parts), one["event_loop_us_per_token"]]
        told = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        rows.append([f"{one['plan']}, {one['batch_size']}, {one['listeners']}", *told])
    speed = record["environment"]["empty_loop_ns"]
    caption = (
        "Microseconds of processor time, the least of three rounds; the device that does nothing is left out.\n"
        f"Parts: a further round with more clocks. A turn of an empty Python loop takes {speed:.0f} ns here."
    )
    head = ["plan, batch, listeners", "us", *parts, "loop"]
    print_table([head, *rows], "the host: microseconds per token, without a model", caption=caption)
