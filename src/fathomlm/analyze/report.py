"""An analysis on disk: all numbers as JSON, pictures, and one page. The directory appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fathomlm.analyze.kv import KVNumbers
from fathomlm.analyze.pages import About, kv_page, routing_page
from fathomlm.analyze.picture_text import draw_text
from fathomlm.analyze.pictures_kv import draw_kv
from fathomlm.analyze.pictures_routing import draw_scaling, draw_scores
from fathomlm.analyze.routing import RoutingNumbers
from fathomlm.checkpoints.writing import check_target, whole_directory
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


def _write(
    kind: str,
    numbers: dict[str, Any],
    about: About,
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
