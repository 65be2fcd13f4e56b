"""An analysis on disk: all numbers as JSON, pictures, and one page. The directory appears whole or not at all.

A page is one file that needs nothing beside it, in light and dark, and runs no script. Everything that comes from a model
or a text is escaped by the template engine, and the page forbids itself scripts and requests, so a token that spells
`<script>` is a token.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from fathomlm import __version__
from fathomlm.checkpoints.resolve import describe, dtype_name
from fathomlm.cli.common import to_json
from fathomlm.cli.display import Rows, model_name, print_table
from fathomlm.lab.analyze.options import AnalysisOptions, TextAnalysis
from fathomlm.lab.common import analysis_directory
from fathomlm.model.seq2seq import FathomModel

Draw = Callable[[Path], object]

PARTS = """\
{% macro table(rows, caption="") %}
<table>
{% if caption %}<caption>{{ caption }}</caption>{% endif %}
<thead><tr>{% for cell in rows[0] %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endmacro %}
"""
"""A table of rows of text, the first of which is its header."""

BASE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{% block title %}{% endblock %}</title>
<style>
:root { color-scheme: light dark; --page: #ffffff; --ink: #1a1a1a; --soft: #595959; --line: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e8e8e8; --soft: #a8a8a8; --line: #44474d; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.note, figcaption, caption { color: var(--soft); }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.9rem 0.2rem 0; text-align: right; }
th:first-child { text-align: left; font-weight: normal; } thead th, thead th:first-child { font-weight: 600; }
figure { margin: 1rem 0; } img { background: #ffffff; border-radius: 4px; max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 0.4rem 1.2rem; }
.side { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; }
.token, pre.text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre.text { font-size: 0.95rem; line-height: 1.65; margin: 0.8rem 0 1.6rem; overflow-wrap: anywhere; white-space: pre-wrap; }
pre.text span { border-left: 1px solid var(--page); padding: 0.1rem 0; }
.legend span { border-radius: 3px; margin-right: 0.4rem; padding: 0.1rem 0.6rem; }
{% block style %}{% endblock %}
</style>
</head>
<body>
{% block body %}{% endblock %}
<p class="note">Made by FathomLM {{ about.version }}.</p>
</body>
</html>
"""
"""The frame of every page; the template of a kind fills its title, style and body."""


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


def about_model(options: TextAnalysis, model: FathomModel) -> About:
    return About(
        model=options.model,
        name=model_name(options.model),
        plan=describe(model),
        dtype=dtype_name(model),
        device=options.device,
        data=list(options.data) or ["--text"],
        version=__version__,
    )


def finish(
    options: AnalysisOptions,
    about: About | RunsAbout,
    summary: dict[str, Any],
    tables: Sequence[Rows],
    files: Sequence[Path],
) -> int:
    """A table or a record, and where the rest is."""

    def show(record: dict[str, Any]) -> None:
        for table in tables:
            print_table(table)
        page = next(file for file in files if file.name == "index.html")
        print(f"report: {page}; numbers and pictures are in the same directory")

    record = {"kind": options.kind, **dataclasses.asdict(about), **summary, "files": [str(file) for file in files]}
    return options.answer(record, show)


def render(template: str, about: About | RunsAbout, pictures: Mapping[str, bytes], **values: Any) -> str:
    """A kind's template as a page. `pictures` are PNG files by name, which become part of it."""
    engine = Environment(
        loader=DictLoader({"base": BASE, "parts": PARTS, "page": template}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = {
        name.removesuffix(".png"): f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for name, data in pictures.items()
    }
    return engine.get_template("page").render(about=about, images=images, **values)


def write_report(
    kind: str,
    numbers: dict[str, Any],
    about: About | RunsAbout,
    draw: Mapping[str, Draw],
    page: Callable[[dict[str, bytes]], str],
    out: Path,
    force: bool,
) -> list[Path]:
    """The files that were written: pictures, a page of them, and all numbers."""
    record = {"kind": kind, **dataclasses.asdict(about), **numbers}
    with analysis_directory(out, kind, force) as place:
        for name, picture in draw.items():
            picture(place / name)
        html = page({name: (place / name).read_bytes() for name in draw})
        (place / "index.html").write_text(html, encoding="utf-8")
        (place / f"{kind}.json").write_text(to_json(record) + "\n", encoding="utf-8")
        files = sorted(file.name for file in place.iterdir())
    return [out / file for file in files]
