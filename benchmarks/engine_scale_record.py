"""The record of engine_scale.py: one file that grows over several calls on one machine, and what is read from it.

Cells are small (one model at one batch size), each is written as soon as it is measured, and a failed one is noted and loses
nothing else. A call goes on with a record of the same source, settings and GPU only: figures of different code are no run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import make_directories, whole_file
from fathomlm.errors import OptionError
from fathomlm.jsonfile import read_object
from fathomlm.lab.common import markdown
from fathomlm.lab.drawing import LINES, MARKERS, check_matplotlib, figure_over_table, plain_axes, save_figure

Record = dict[str, Any]
NAMES = {
    "vanilla": "plain",
    "mor2": "MoR, 2 recursions",
    "mor3": "MoR, 3 recursions",
    "mor4": "MoR, 4 recursions",
    "exits": "two loops, half exit early",
}
KEPT = ("source", "settings", "environment", "gpu")
"""What must be the same for a record to be continued."""
BARS = {
    "vanilla_256rows.tokens_per_s": 180_000, "mor3_256rows.speedup": 1.40, "mor3_same_bytes.speedup": 1.50,
    "mor4_same_bytes.speedup": 1.60, "vanilla_256rows.host_us_per_token": 2, "mor3_256rows.host_us_per_token": 2,
    "vanilla_360m_1row.floor_share": 0.45, "vanilla_1.7b_1row.floor_share": 0.78, "prefill_1.7b.mfu": 0.45,
    "prefill_360m.tokens_per_s": 350_000, "mor3_512_2048.speedup": 1.35, "bundled.speedup": 1.15,
}  # fmt: skip
"""What this benchmark was written to show: at least, but for the host's microseconds."""
_CELL = re.compile(rf"({'|'.join(NAMES)})_(\d+)rows")
_COMPARED = re.compile(rf"({'|'.join(NAMES)})_(\d+rows|same_bytes|512_2048|nano_vllm)(_[a-z0-9]+)?")


def source_hash(files: Iterable[Path]) -> str:
    """Of what is measured and what measures it. A machine that runs it may have no git."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def open_record(path: Path, head: Record, *, fresh: bool = False, mixed: bool = False) -> Record:
    """The record to go on with, or a new one. `head` says what is run and where; with `mixed` one of another source or GPU
    is continued, and says so."""
    new = head | {"seconds": {}, "failures": {}, "tries": {}}
    if fresh or not path.exists():
        return new
    found = dict(read_object(path, error=OptionError, nonfinite=True).values)
    if not {"seconds", "failures", "tries", *KEPT} <= found.keys():
        raise OptionError(f"{path} is not a record that can be continued; --fresh begins a new one in its place")
    different = [name for name in KEPT if _lasting(found[name]) != _lasting(head[name])]
    if "settings" in different or (different and not mixed):
        said = ", ".join(different)
        raise OptionError(
            f"{path} was measured with another {said}; --fresh begins anew, and --mixed goes on where the settings agree"
        )
    if different:
        found.setdefault("mixed", []).append({name: head[name] for name in different})
    return found


def _lasting(value: Any) -> Any:
    """A call may go on after midnight, and thread counts are the machine's mood."""
    return {k: v for k, v in value.items() if k not in ("date", "threads")} if isinstance(value, dict) else value


def write_record(record: Record, path: Path) -> None:
    make_directories(path.parent)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")


def add_try(record: Record, key: str, label: str, found: Record) -> None:
    """One of several settings of a measurement, of which the fastest is what counts."""
    tries = record["tries"].setdefault(key, {})
    tries[label] = found
    best = max(tries.values(), key=lambda one: one["tokens_per_s"])
    record[key] = best | {"tried": {name: one["tokens_per_s"] for name, one in tries.items()}}


def compare(record: Record) -> None:
    """Every speedup, from what is there: of whatever order it was measured in."""
    for key, found in record.items():
        match = _COMPARED.fullmatch(key)
        base = f"vanilla_{match[2]}" if match else "bundled_plain" if key in ("bundled", "bundled_plain") else None
        if base is None:
            continue
        found.pop("speedup", None)
        if base in record:
            found["speedup"] = round(found["tokens_per_s"] / record[base]["tokens_per_s"], 3)


def bar_rows(record: Record) -> list[list[str]]:
    """What was asked for and what was measured, for whoever runs it."""
    rows = [["key", "asked", "measured", ""]]
    for name, bar in BARS.items():
        key, field = name.rsplit(".", 1)
        found = record.get(key, {}).get(field)
        met = found is not None and (found <= bar if field.startswith("host") else found >= bar)
        rows.append(
            [name, f"{bar:,}", "-" if found is None else f"{found:,}", "met" if met else "" if found is None else "NOT MET"]
        )
    return rows


def points(record: Record) -> dict[str, list[Record]]:
    """By model, its cells in order of batch size."""
    found: dict[str, list[Record]] = {}
    for key, cell in record.items():
        if match := _CELL.fullmatch(key):
            found.setdefault(match[1], []).append(cell | {"rows": int(match[2])})
    return {name: sorted(found[name], key=lambda cell: int(cell["rows"])) for name in NAMES if name in found}


def sweep_rows(record: Record) -> list[list[str]]:
    header = [
        "model",
        "batch size",
        "sequences",
        "tokens/s",
        "against plain",
        "device alone",
        "host us/token",
        "floor",
        "ms/token",
    ]
    rows = [header]
    for name, cells in points(record).items():
        for cell in cells:
            numbers = [f"{cell['rows']}", f"{cell['slots']}", f"{cell['tokens_per_s']:,}", _times(cell)]
            numbers += [f"{cell['device_tokens_per_s']:,}", f"{cell['host_us_per_token']:.2f}"]
            rows.append([NAMES[name], *numbers, f"{cell['floor_share']:.0%}", f"{cell['inter_token_ms_p50']:.2f}"])
    return rows


def best_rows(record: Record) -> list[list[str]]:
    """Workloads where each side runs at the best of the batch sizes that were tried."""
    titles = {
        "same_bytes": "same bytes",
        "512_2048": "512 in, 2,048 out",
        "nano_vllm": "nano-vllm's: 100 to 1,024 in and out",
    }
    keys = [(title, f"{name}_{kind}", NAMES[name]) for kind, title in titles.items() for name in NAMES]
    keys += [("bundled model", "bundled_plain", "plain, as deep"), ("bundled model", "bundled", "fathom-mor-23m")]
    keys.append(("one token in, 64 out", "transformers_cb", "transformers' continuous batching, plain"))
    rows = [["workload", "model", "tokens/s", "against plain", "best at", "preemptions", "tried"]]
    for title, key, name in keys:
        if found := record.get(key):
            tried = "; ".join(f"{label}: {speed:,}" for label, speed in found["tried"].items())
            preempted = str(found.get("preemptions", "-"))
            rows.append([title, name, f"{found['tokens_per_s']:,}", _times(found), f"{found['rows']}", preempted, tried])
    return rows


def arrival_rows(record: Record) -> list[list[str]]:
    header = ["model", "load", "requests/s", "first token ms, p50", "p99", "ms/token, p50", "p99", "failed"]
    rows = [header]
    for name in NAMES:
        for load, found in record.get(f"{name}_poisson", {}).get("loads", {}).items():
            times = (found["time_to_first_token_ms"], found["inter_token_ms"])
            latencies = [f"{one[part]:.1f}" if one else "-" for one in times for part in ("p50", "p99")]
            rows.append([NAMES[name], f"{float(load):.0%}", f"{found['requests_per_s']}", *latencies, str(found["failed"])])
    return rows


def other_rows(record: Record) -> list[list[str]]:
    rows = [["what", "measured"]]
    for shape in ("360m", "1.7b"):
        if one := record.get(f"vanilla_{shape}_1row"):
            part = f"{one['ms_per_token']:.3f} ms per token, {one['floor_share']:.0%} of what reading the weights allows"
            rows.append([f"plain {shape}, one sequence", part])
        if read := record.get(f"prefill_{shape}"):
            part = f"{read['tokens_per_s']:,} tokens/s, {read['mfu']:.0%} of 989 TFLOP/s in products"
            rows.append([f"plain {shape}, prompts of {read['prompt']:,} tokens", part])
    return rows


def _times(found: Record) -> str:
    return f"{found['speedup']:.2f}" if "speedup" in found else "-"


def page(record: Record, picture: str) -> str:
    """The record for people."""
    where, settings = record["environment"], record["settings"]
    lines = [
        "# The engine at every batch size", "",
        f"{where['device']}, torch {where['torch']}, {where['date']}; source {record.get('commit') or record['source']}. "
        f"Random weights of the {settings['shape']} shape, greedy; depths and exits are drawn as routers are trained for. "
        f"Memory is read at {record['reading_gb_per_s']} GB/s.", "",
        f"Unless another workload is named: prompts of one token, {settings['mean']:g} new tokens on average (standard "
        f"deviation: a quarter of that), {settings['rounds']} requests for each concurrent sequence, memory for all. "
        "`device alone` is the same decode steps launched back to back, `host` what the loop takes above that, `floor` the "
        "share of the time in which weights and the KV cache could have been read once, `ms/token` the median over requests "
        "of the mean time between tokens.", "",
        f"![Throughput against latency]({picture})", "", *markdown(sweep_rows(record)),
    ]  # fmt: skip
    for title, rows in (
        ("Each side at its best batch size", best_rows(record)),
        ("Requests that arrive at random", arrival_rows(record)),
        ("One sequence, and prompts", other_rows(record)),
    ):
        if len(rows) > 1:
            lines += ["", f"## {title}", "", *markdown(rows)]
    if record.get("mixed"):
        lines += ["", f"Continued on another machine or source: {json.dumps(record['mixed'])}"]
    if record["failures"]:
        lines += ["", "## Not measured", "", *(f"- {cell}: {why}" for cell, why in record["failures"].items())]
    return "\n".join(lines) + "\n"


def draw(record: Record, out: Path) -> None:
    """Throughput against latency; each point is a batch size."""
    check_matplotlib()
    from matplotlib.ticker import LogLocator, NullFormatter

    found = points(record)
    if not found:
        raise OptionError("the record has no batch sizes to draw: run the part 'rows'")
    sizes = sorted({cell["rows"] for cells in found.values() for cell in cells})
    table = [["tokens/s, ms per token", *(f"{rows} row{'s'[: rows != 1]}" for rows in sizes)]]
    for name, cells in found.items():
        by_rows = {cell["rows"]: f"{cell['tokens_per_s']:,}  {cell['inter_token_ms_p50']:.2f}" for cell in cells}
        table.append([NAMES[name], *(by_rows.get(rows, "-") for rows in sizes)])
    colors = dict(zip(NAMES, LINES, strict=False))
    figure, grid = figure_over_table(9.6, [5.2], table, [colors[name] for name in found])
    axes = figure.add_subplot(grid[0])
    for number, (name, cells) in enumerate(found.items()):
        x, y = [cell["inter_token_ms_p50"] for cell in cells], [cell["tokens_per_s"] for cell in cells]
        axes.plot(x, y, color=colors[name], marker=MARKERS[number], markersize=5, linewidth=1.4, label=NAMES[name])
        for cell, at in zip(cells, zip(x, y, strict=True), strict=True):
            beside = (5, -9) if number % 2 == 0 else (-5, 5)  # neighbours lie close together
            side = "left" if number % 2 == 0 else "right"
            axes.annotate(
                str(cell["rows"]), at, xytext=beside, textcoords="offset points", ha=side, fontsize=7.5, color=colors[name]
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    plain_axes(axes, x="latency (ms per token of one sequence, median)", y="throughput (tokens per second)")
    axes.legend(frameon=False, fontsize=9)
    where = record["environment"]
    about = f"{where['device']}, {record['settings']['shape']} shape, random weights; points are batch sizes"
    save_figure(figure, f"Throughput against latency per token\n{about}", out)
