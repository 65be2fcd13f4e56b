"""An analysis on disk: all numbers as JSON, pictures, and one page. The directory appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import check_target, whole_directory
from fathomlm.lab.analyze.curves import METRICS, PlotOptions, plot
from fathomlm.lab.analyze.exits import ExitNumbers
from fathomlm.lab.analyze.kv import KVNumbers
from fathomlm.lab.analyze.pages import About, RunsAbout, exits_page, kv_page, routing_page, runs_page, weights_page
from fathomlm.lab.analyze.picture_text import draw_text
from fathomlm.lab.analyze.pictures_exits import draw_confidence, draw_layers, draw_times
from fathomlm.lab.analyze.pictures_kv import draw_kv
from fathomlm.lab.analyze.pictures_routing import draw_scaling, draw_scores
from fathomlm.lab.analyze.pictures_weights import draw_energy, draw_ranks
from fathomlm.lab.analyze.routing import RoutingNumbers
from fathomlm.lab.analyze.runs import Run, Summary, exit_depths, points
from fathomlm.lab.analyze.weights import WeightNumbers
from fathomlm.train.report import strict

Draw = Callable[[Path], None]


def check_directory(out: Path, kind: str, force: bool) -> None:
    """Refuse before any work is done what could not be written: `force` replaces an earlier analysis of this kind only."""
    check_target(out, force or _is_empty(out), **_marks(kind))


def write_routing(numbers: RoutingNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw: dict[str, Draw] = {
        "scores.png": partial(draw_scores, numbers, about.name),
        "scaling.png": partial(draw_scaling, numbers, about.name),
        "text.png": partial(draw_text, numbers, about.name),
    }
    return _write("routing", numbers.to_dict(), about, draw, partial(routing_page, numbers, about), out, force)


def write_kv(numbers: KVNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw: dict[str, Draw] = {"kv.png": partial(draw_kv, numbers, about.name)}
    return _write("kv", numbers.to_dict(), about, draw, partial(kv_page, numbers, about), out, force)


def write_exits(numbers: ExitNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw: dict[str, Draw] = {
        "layers.png": partial(draw_layers, numbers, about.name),
        "confidence.png": partial(draw_confidence, numbers, about.name),
    }
    if numbers.breakdown is not None:
        draw["times.png"] = partial(draw_times, numbers.breakdown, about.name)
    return _write("exits", numbers.to_dict(), about, draw, partial(exits_page, numbers, about), out, force)


def write_weights(numbers: WeightNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw: dict[str, Draw] = {
        "energy.png": partial(draw_energy, numbers, about.name),
        "ranks.png": partial(draw_ranks, numbers, about.name),
    }
    return _write("weights", numbers.to_dict(), about, draw, partial(weights_page, numbers, about), out, force)


def write_runs(
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    options: PlotOptions,
    about: RunsAbout,
    out: Path,
    force: bool = False,
) -> list[Path]:
    """Losses, and every other metric that some of the runs recorded."""
    titles = {"losses": "training and validation loss"}
    draw: dict[str, Draw] = {"losses.png": partial(_draw_curves, runs, options)}
    for metric in _recorded(runs):
        titles[metric] = METRICS[metric][0]
        logy = options.logy and metric == "exits"
        draw[f"{metric}.png"] = partial(_draw_curves, runs, dataclasses.replace(options, metric=metric, logy=logy))
    numbers = {"summaries": [summary.to_dict() for summary in summaries]}
    return _write("runs", numbers, about, draw, partial(runs_page, summaries, titles, about), out, force)


def _draw_curves(runs: Sequence[Run], options: PlotOptions, out: Path) -> None:
    plot(runs, out, options)


def _recorded(runs: Sequence[Run]) -> list[str]:
    def some(metric: str) -> bool:
        return any(points(run.train, metric, lambda record: 0.0) for run in runs)

    found = [metric for metric in ("lr", "grad_norm", "tokens_per_s", "mfu", "mfu_sustained") if some(metric)]
    return ["exits", *found] if exit_depths(runs) else found


def _write(
    kind: str,
    numbers: dict[str, Any],
    about: About | RunsAbout,
    draw: Mapping[str, Draw],
    page: Callable[[dict[str, bytes]], str],
    out: Path,
    force: bool,
) -> list[Path]:
    """The files that were written."""
    record = {"kind": kind, **dataclasses.asdict(about), **numbers}
    with whole_directory(out, force or _is_empty(out), **_marks(kind)) as place:
        for name, picture in draw.items():
            picture(place / name)
        html = page({name: (place / name).read_bytes() for name in draw})
        (place / "index.html").write_text(html, encoding="utf-8")
        text = json.dumps(strict(record), ensure_ascii=False, allow_nan=False)
        (place / f"{kind}.json").write_text(text + "\n", encoding="utf-8")
        files = sorted(file.name for file in place.iterdir())
    return [out / file for file in files]


def _is_empty(out: Path) -> bool:
    return out.is_dir() and not out.is_symlink() and not any(out.iterdir())


def _marks(kind: str) -> dict[str, str]:
    return {"what": f"{kind} analysis", "sign": f"{kind}.json"}
