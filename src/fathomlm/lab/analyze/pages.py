"""Analyses as pages: one file each that needs nothing beside it, in light and dark, and runs no script.

Everything that comes from a model or a text is escaped by the template engine, and the page forbids itself scripts and
requests, so a token that spells `<script>` is a token.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from fathomlm.cli.colours import depth_colours, ink
from fathomlm.cli.shown import label, visible
from fathomlm.lab.analyze.curves import table_of
from fathomlm.lab.analyze.exits import ExitNumbers
from fathomlm.lab.analyze.kv import KVNumbers
from fathomlm.lab.analyze.routing import RoutingNumbers, ShownToken
from fathomlm.lab.analyze.runs import Summary
from fathomlm.lab.analyze.tables import (
    flops_table,
    gain_table,
    kv_table,
    routing_table,
    scaling_table,
    score_table,
    worth_table,
)
from fathomlm.lab.analyze.tables_exits import fit_table, layer_table, time_table
from fathomlm.lab.analyze.tables_weights import kind_table, rank_table
from fathomlm.lab.analyze.templates import BASE, EXITS, KV, PARTS, ROUTING, RUNS, WEIGHTS
from fathomlm.lab.analyze.weights import WeightNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was looked at, and with what."""

    model: str
    """As the user named it."""
    name: str
    """A short name, for titles."""
    plan: str
    """In words."""
    dtype: str
    device: str
    data: list[str]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsAbout:
    """The same of training runs."""

    name: str
    """A short name, for titles."""
    runs: list[str]
    """As the user named them."""
    x: str
    """What curves are drawn over."""
    version: str


def routing_page(numbers: RoutingNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    """`pictures` are PNG files by name."""
    colours = depth_colours(len(numbers.capacity))
    return _render(
        "routing",
        about,
        pictures,
        numbers=numbers,
        depths=[{"depth": depth, "colour": colour, "ink": ink(colour)} for depth, colour in enumerate(colours)],
        shares=numbers.depth_shares(),
        summary=routing_table(numbers),
        flops=flops_table(numbers),
        scores=score_table(numbers),
        scaling=scaling_table(numbers),
        gain=gain_table(numbers),
        worth=worth_table(numbers),
        texts=[[_token(token, numbers.router) for token in sample] for sample in numbers.samples],
        label=label,
    )


def kv_page(numbers: KVNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    return _render("kv", about, pictures, numbers=numbers, summary=kv_table(numbers))


def exits_page(numbers: ExitNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    times = None if numbers.breakdown is None else time_table(numbers.breakdown)
    tables = {"layers": layer_table(numbers), "fits": fit_table(numbers), "times": times}
    return _render("exits", about, pictures, numbers=numbers, **tables)


def weights_page(numbers: WeightNumbers, about: About, pictures: Mapping[str, bytes]) -> str:
    return _render("weights", about, pictures, ranks=rank_table(numbers), kinds=kind_table(numbers))


def runs_page(
    summaries: Sequence[Summary], titles: Mapping[str, str], about: RunsAbout, pictures: Mapping[str, bytes]
) -> str:
    """`titles` are those of the pictures, by name."""
    return _render("runs", about, pictures, summary=table_of(summaries), titles=titles)


def _render(kind: str, about: About | RunsAbout, pictures: Mapping[str, bytes], **values: Any) -> str:
    kinds = {"routing": ROUTING, "kv": KV, "exits": EXITS, "weights": WEIGHTS, "runs": RUNS}
    templates = {"base": BASE, "parts": PARTS, **kinds}
    engine = Environment(
        loader=DictLoader(templates), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    images = {
        name.removesuffix(".png"): f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for name, data in pictures.items()
    }
    return engine.get_template(kind).render(about=about, images=images, **values)


def _token(token: ShownToken, router: str) -> dict[str, Any]:
    """A token of the coloured text: what is seen, and what is said of it."""
    what = "recursion" if router == "expert" else "depth"
    said = [
        f"{what} {place}: {'not asked' if score is None else f'{score:.3f}'}"
        for place, score in enumerate(token.scores, start=1)
    ]
    note = f"depth {token.depth}; token {token.token}; router scores: {', '.join(said)}"
    return {"text": visible(token.text), "depth": token.depth, "note": note}
