"""The record of engine_scale.py for people: tables, a page, a picture, and the part of the documentation that quotes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine_scale_record import NAMES, Record

from fathomlm.errors import OptionError
from fathomlm.lab.common import markdown
from fathomlm.lab.drawing import LINES, MARKERS, check_matplotlib, figure_over_table, plain_axes, save_figure

_CELL = re.compile(rf"({'|'.join(NAMES)})_(\d+)rows")
BEGIN, END = "<!-- engine_scale: begin -->", "<!-- engine_scale: end -->"
"""Around what the documentation quotes; `--docs` writes it anew."""
FULL = {"mor2": 2.0, "mor4": 2.0, "exits": 0.5}
"""Tokens for each row of a full decode step, where it is not one: with two turns, or where a token takes two rows."""


def points(record: Record) -> dict[str, list[Record]]:
    """By model, its cells in order of batch size."""
    found: dict[str, list[Record]] = {}
    for key, cell in record.items():
        if match := _CELL.fullmatch(key):
            found.setdefault(match[1], []).append(cell | {"rows": int(match[2])})
    return {name: sorted(found[name], key=lambda cell: int(cell["rows"])) for name in NAMES if name in found}


def device_alone(name: str, cell: Record) -> tuple[int, float]:
    """Tokens/s of full batches launched back to back, and the microseconds that a token takes above that end to end. Records
    without `device_tokens_per_tick` were told these of a step's average tokens in the workload, rows that are empty at its
    end included, so that the device seemed slower than the engine; full batches bound them from the other side."""
    if "device_tokens_per_tick" in cell:
        return cell["device_tokens_per_s"], cell["host_us_per_token"]
    device = 1e3 * FULL.get(name, 1.0) * cell["rows"] / cell["device_ms_per_tick"]
    return round(device), 1e6 / cell["tokens_per_s"] - 1e6 / device


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
            device, host = device_alone(name, cell)
            numbers += [f"{device:,}", f"{host:.2f}"]
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
    """Tokens come by the burst: most of them with no time behind the one before, so the mean stands in for the median."""
    rows = [["model", "load", "requests/s", "first token ms, p50", "p99", "between tokens ms, mean", "p99", "failed"]]
    for name in NAMES:
        for load, found in record.get(f"{name}_poisson", {}).get("loads", {}).items():
            times = (("time_to_first_token_ms", ("p50", "p99")), ("inter_token_ms", ("mean", "p99")))
            latencies = [f"{found[time][part]:.1f}" if found[time] else "-" for time, parts in times for part in parts]
            rows.append([NAMES[name], f"{float(load):.0%}", f"{found['requests_per_s']}", *latencies, str(found["failed"])])
    return rows


def other_rows(record: Record) -> list[list[str]]:
    rows = [["what", "measured"]]
    for key, said in (("360m", "plain 360m"), ("mor3_360m", f"{NAMES['mor3']}, 360m"), ("1.7b", "plain 1.7b")):
        if one := record.get(f"vanilla_{key}_1row"):
            part = f"{one['ms_per_token']:.3f} ms per token, {one['floor_share']:.0%} of what reading the weights allows"
            rows.append([f"{said}, one sequence", part])
        if read := record.get(f"prefill_{key}"):
            part = f"{read['tokens_per_s']:,} tokens/s, {read['mfu']:.0%} of 989 TFLOP/s in products"
            rows.append([f"{said}, prompts of {read['prompt']:,} tokens", part])
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
        "`device alone` is decode steps of a full batch launched back to back, `host` what a token takes above that end to "
        "end: the host, and rows that are empty at the end of the workload. `floor` is the share of the time in which "
        "weights and the KV cache could have been read once, `ms/token` the median over requests of the mean time between "
        "tokens.", "",
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


def quoted(text: str, record: Record, link: str) -> str:
    """A page with its part between the marks written from a record, which is at `link` from there."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise OptionError(f"the page must have one part between {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{quote(record, link)}\n{END}{after}"


def quote(record: Record, link: str) -> str:
    """What the documentation says of a record, figures rounded to hundreds."""
    where, stem = record["environment"], link.removesuffix(".json")
    lines = [
        f"{where['device']}, torch {where['torch']}, {where['date']} ([record]({link}), [tables]({stem}.md)). Tokens/s end "
        "to end, in brackets those of the device alone with full batches:",
        "", *markdown(quoted_sweep(record)), "", quoted_range(record), "", f"![Throughput against latency]({stem}.png)",
    ]  # fmt: skip
    best = [row[:6] for row in best_rows(record)]
    for said, rows in (
        ("Each side at the best of the batch sizes that were tried:", best),
        ("Requests that arrive at random, at parts of the rate that a batch of 64 sustains:", arrival_rows(record)),
        ("One sequence, and prompts alone:", other_rows(record)),
    ):
        if len(rows) > 1:
            lines += ["", said, "", *markdown(rows)]
    return "\n".join(lines)


def quoted_sweep(record: Record) -> list[list[str]]:
    """A row for each batch size, a column for each model."""
    found = points(record)
    sizes = sorted({cell["rows"] for cells in found.values() for cell in cells})
    rows = [["batch size", *(NAMES[name] for name in found)]]
    for size in sizes:
        cells = [next((cell for cell in found[name] if cell["rows"] == size), None) for name in found]
        told = zip(found, cells, strict=True)
        rows.append([str(size), *("-" if cell is None else _speed(name, cell) for name, cell in told)])
    return rows


def _speed(name: str, cell: Record) -> str:
    """With the factor against the plain model, where it is another."""
    said = f"{_round(cell['tokens_per_s'])} ({_round(device_alone(name, cell)[0])})"
    return said if cell.get("speedup", 1.0) == 1.0 else f"{said}: {cell['speedup']:.2f} times"


def _round(speed: int) -> str:
    return f"{round(speed, -2):,}" if speed >= 10_000 else f"{speed:,}"


def quoted_range(record: Record) -> str:
    """What the host takes where batches are large, and how near the floor they come."""
    large = [(name, cell) for name, cells in points(record).items() for cell in cells if cell["rows"] >= 256]
    if not large:
        return "Batches of 256 and more were not measured."
    hosts, floors = [device_alone(*each)[1] for each in large], [cell["floor_share"] for _, cell in large]
    return (
        f"At 256 and more the host and empty rows add at most {max(0.0, *hosts):.1f} us per token; reading weights and KV "
        f"cache once would take {min(floors):.0%} to {max(floors):.0%} of the time."
    )
