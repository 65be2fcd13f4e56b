"""What tying takes away, and how much of it a relaxation of some rank would give back (thesis 3.3.3, SVD initialisation).

For each step of a plan the residual is the base layer in its place less the tied weight that it would share. A LoRA of rank
r that starts from the truncated SVD captures the r largest singular values, so the energy (sum of squares) that lies in
them says what rank is worth its parameters. Only steps whose layer is shared have a residual.

Nothing is converted: a tensor's group is read, tied, compared and let go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm import __version__
from fathomlm.checkpoints.assemble import BaseCheckpoint, ModelBase
from fathomlm.checkpoints.huggingface import read_config
from fathomlm.checkpoints.locate import locate
from fathomlm.checkpoints.native import is_native
from fathomlm.checkpoints.resolve import describe, load, open_base
from fathomlm.checkpoints.tying import WEIGHTS_ONLY, starting_layers
from fathomlm.cli.display import Rows, model_name, progress_bar
from fathomlm.depth import Architecture, DepthPlan, LinearSpec, Relaxation
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError, choices
from fathomlm.lab.analyze.options import AnalyzeWeights
from fathomlm.lab.analyze.report import About, finish, render, write_report
from fathomlm.lab.common import OnProgress, amount, unwatched
from fathomlm.lab.drawing import DASHES, LINES, figure_over_table, new_figure, plain_axes, save_figure, shortened
from fathomlm.model.relax.lora import residual_energies

SHARES = (0.5, 0.9, 0.99)
"""Parts of the energy whose rank is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """One linear at one step under one initialisation."""

    init: str
    linear: str
    step: int
    """From 1, in unrolled depth."""
    recursion: int
    """From 1."""
    full_rank: int
    energy: float
    """The residual's squared Frobenius norm."""
    relative: float
    """The residual's norm against that of the base layer's own weight."""
    captured: list[float]
    """By rank, from 1: the part of the energy in so many singular values. All ones where there is no residual."""

    def rank_for(self, share: float) -> int:
        """The smallest rank that captures this part; 0 where tying took nothing away."""
        if not self.energy:
            return 0
        return next(rank for rank, part in enumerate(self.captured, start=1) if part >= share - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank on every linear of every shared step."""

    rank: int
    captured: dict[str, float]
    """By initialisation: the part of all residual energy."""
    added_parameters: int
    non_embedding_parameters: int
    """Of the relaxed model."""
    relative_parameters: float
    """Against the untied base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNumbers:
    sharing: str
    recursions: int
    layout: str
    inits: list[str]
    linears: list[str]
    spectra: list[Spectrum]
    ranks: list[RankRow]

    def of(self, init: str, linear: str) -> list[Spectrum]:
        """By step."""
        return [each for each in self.spectra if each.init == init and each.linear == linear]

    def summary(self) -> dict[str, Any]:
        """Without spectra: for each initialisation and linear the ranks that parts of the energy need."""
        record = dataclasses.asdict(self)
        del record["spectra"]
        pairs = [(init, linear) for init in self.inits for linear in self.linears]
        return record | {"kinds": [{"init": init, "linear": linear, **self.sums(init, linear)} for init, linear in pairs]}

    def sums(self, init: str, linear: str) -> dict[str, Any]:
        """Over the steps: the mean relative norm, and the largest rank that any of them needs for each share."""
        spectra = self.of(init, linear)
        ranks = {f"rank_{round(100 * share)}": max(each.rank_for(share) for each in spectra) for share in SHARES}
        mean = sum(each.relative for each in spectra) / len(spectra)
        return {"full_rank": spectra[0].full_rank, "relative": mean, **ranks}


def open_plain(source: str | Path) -> BaseCheckpoint:
    """The base to tie: any plain model, read a tensor at a time where it lies in files."""
    path = locate(source)
    if path.is_dir() and is_native(read_config(path)):
        model = load(path)
        if model.plan.recursions > 1 or model.relaxation is not None:
            raise OptionError(f"{source} was converted already ({describe(model)}); analyze the plain model it came from")
        return ModelBase(model)
    return open_base(path)


def check_inits(inits: Sequence[str]) -> tuple[str, ...]:
    for init in inits:
        if init not in WEIGHTS_ONLY:
            raise OptionError(choices("init", init, WEIGHTS_ONLY))
    return tuple(dict.fromkeys(inits))


@torch.inference_mode()
def measure(
    base: BaseCheckpoint,
    plan: DepthPlan,
    inits: Sequence[str] = ("average", "stepwise"),
    *,
    on_linear: OnProgress = unwatched,
) -> WeightNumbers:
    """Spectra of all residuals. `on_linear` is called with (done, total)."""
    if plan.recursions < 2:
        raise OptionError("with one recursion nothing is tied, so there is no residual; give --recursions 2 or more")
    chosen, specs = check_inits(inits), base.architecture.linears()
    shared = sorted({step.layer for step in plan if plan.is_shared(step)})
    starts = {init: starting_layers(plan, init) for init in chosen}  # type: ignore[arg-type]
    spectra: list[Spectrum] = []
    total, done = len(shared) * len(specs), 0
    for layer in shared:
        for spec in specs:
            read = _Reader(base, f"{spec.path}.weight")
            for init in chosen:
                tied = read.mean(starts[init][layer])
                spectra += [
                    _spectrum(init, spec, step.index + 1, step.recursion + 1, read(step.origin), tied)
                    for step in plan.uses(layer)
                ]
            done += 1
            on_linear(done, total)
    spectra.sort(key=lambda each: (chosen.index(each.init), each.step))
    return WeightNumbers(
        sharing=plan.sharing,
        recursions=plan.recursions,
        layout=plan.layout,
        inits=list(chosen),
        linears=[spec.name for spec in specs],
        spectra=spectra,
        ranks=_rank_rows(base.architecture, plan, chosen, spectra),
    )


class _Reader:
    """One kind of weight over the base's layers, in float64, each read once."""

    def __init__(self, base: BaseCheckpoint, name: str) -> None:
        self._base, self._name = base, name
        self._read: dict[int, Tensor] = {}

    def __call__(self, layer: int) -> Tensor:
        if layer not in self._read:
            self._read[layer] = self._base.tensor(f"layers.{layer}.{self._name}").double()
        return self._read[layer]

    def mean(self, layers: Sequence[int]) -> Tensor:
        return torch.stack([self(layer) for layer in layers]).mean(0)


def _spectrum(init: str, spec: LinearSpec, step: int, recursion: int, own: Tensor, tied: Tensor) -> Spectrum:
    squares = residual_energies(own - tied)
    energy = float(squares.sum())
    captured = (squares.cumsum(0) / energy).clamp(max=1.0).tolist() if energy else [1.0] * len(squares)
    return Spectrum(
        init=init,
        linear=spec.name,
        step=step,
        recursion=recursion,
        full_rank=len(squares),
        energy=energy,
        relative=float((own - tied).norm() / own.norm().clamp_min(torch.finfo(own.dtype).tiny)),
        captured=captured,
    )


def _rank_rows(
    architecture: Architecture, plan: DepthPlan, inits: Sequence[str], spectra: Sequence[Spectrum]
) -> list[RankRow]:
    """Powers of two up to the largest full rank, which captures everything."""
    most = max(each.full_rank for each in spectra)
    ranks = [2**power for power in range(most.bit_length()) if 2**power < most]
    untied = count(architecture, DepthPlan.vanilla(architecture.layers)).non_embedding_parameters
    rows = []
    for rank in [*ranks, most]:
        relaxation = Relaxation(kind="lora", ranks={spec.name: rank for spec in architecture.linears()}, vectors=False)
        cost = count(architecture, plan, relaxation=relaxation)
        rows.append(
            RankRow(
                rank=rank,
                captured={init: _captured([each for each in spectra if each.init == init], rank) for init in inits},
                added_parameters=cost.relaxation_parameters,
                non_embedding_parameters=cost.non_embedding_parameters,
                relative_parameters=cost.non_embedding_parameters / untied,
            )
        )
    return rows


def _captured(spectra: Sequence[Spectrum], rank: int) -> float:
    whole = sum(each.energy for each in spectra)
    if not whole:
        return 1.0
    return sum(each.energy * each.captured[min(rank, each.full_rank) - 1] for each in spectra) / whole


def bands(numbers: WeightNumbers, init: str, linear: str) -> Mapping[str, list[float]]:
    """Captured energy by rank over the steps that have a residual: least, mean and most."""
    curves = [each.captured for each in numbers.of(init, linear) if each.energy] or [numbers.of(init, linear)[0].captured]
    columns = list(zip(*curves, strict=True))
    return {
        "least": [min(column) for column in columns],
        "mean": [sum(column) / len(column) for column in columns],
        "most": [max(column) for column in columns],
    }


COLUMNS = 4
SHARE = 0.9
TICKS = 16


def write_weights(numbers: WeightNumbers, about: About, out: Path, force: bool = False) -> list[Path]:
    draw = {
        "energy.png": partial(draw_energy, numbers, about.name),
        "ranks.png": partial(draw_ranks, numbers, about.name),
    }
    page = partial(render, TEMPLATE, about, ranks=rank_table(numbers), kinds=kind_table(numbers))
    return write_report("weights", asdict(numbers), about, draw, page, out, force)


def rank_table(numbers: WeightNumbers) -> Rows:
    """What one rank on every linear would capture, and cost."""
    rows = [["rank on every linear", *(f"captured, {init}" for init in numbers.inits), "added", "parameters", "of the base"]]
    for row in numbers.ranks:
        captured = [f"{row.captured[init]:.1%}" for init in numbers.inits]
        size = [amount(row.added_parameters), amount(row.non_embedding_parameters), f"{row.relative_parameters:.2f}x"]
        rows.append([str(row.rank), *captured, *size])
    return rows


def kind_table(numbers: WeightNumbers) -> Rows:
    """For each linear the norm of what is lost, and the rank that the worst step needs for parts of its energy."""
    rows = [["linear", "init", "lost norm", *(f"rank for {share:.0%}" for share in SHARES), "full rank"]]
    for linear in numbers.linears:
        for init in numbers.inits:
            sums = numbers.sums(init, linear)
            ranks = [str(sums[f"rank_{round(100 * share)}"]) for share in SHARES]
            rows.append([linear, init, f"{sums['relative']:.2f}", *ranks, str(sums["full_rank"])])
    return rows


def draw_energy(numbers: WeightNumbers, name: str, out: Path) -> None:
    """A panel a linear: the mean over steps as a line, the least and the most as a band; the table under them."""
    columns = min(COLUMNS, len(numbers.linears))
    lines = math.ceil(len(numbers.linears) / columns)
    figure, grid = figure_over_table(3.7 * columns, [3.1] * lines, rank_table(numbers), columns=columns)
    axes: Any = None
    for place, linear in enumerate(numbers.linears):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        for number, init in enumerate(numbers.inits):
            band = bands(numbers, init, linear)
            ranks = range(1, len(band["mean"]) + 1)
            colour = LINES[number % len(LINES)]
            axes.fill_between(ranks, band["least"], band["most"], color=colour, alpha=0.18, linewidth=0)
            label = f"{init} (mean; band: all steps)"
            axes.plot(ranks, band["mean"], color=colour, linestyle=DASHES[number % len(DASHES)], linewidth=1.7, label=label)
        axes.axhline(SHARE, color="0.5", linewidth=0.8, linestyle=(0, (4, 3)), label=f"{SHARE:.0%} of the energy")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, at: f"{value:g}")
        axes.set_ylim(0, 1.02)
        plain_axes(axes, linear, "rank", "captured energy (part)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    title = f"{shortened(name)}: how much of what tying takes away a rank gives back ({_plan(numbers)})"
    save_figure(figure, title, out)


def draw_ranks(numbers: WeightNumbers, name: str, out: Path) -> None:
    """A map for each initialisation: the rank that each step needs on each linear, against the full rank."""
    from matplotlib.colors import Normalize

    inits, linears = numbers.inits, numbers.linears
    steps = [each.step for each in numbers.of(inits[0], linears[0])]
    figure = new_figure(max(7.0, 0.34 * len(steps) + 3.0), 0.42 * len(linears) * len(inits) + 1.4 * len(inits) + 0.8)
    grid = figure.add_gridspec(len(inits), 1)
    image = None
    for place, init in enumerate(inits):
        axes = figure.add_subplot(grid[place])
        rows = [numbers.of(init, linear) for linear in linears]
        parts = [[each.rank_for(SHARE) / each.full_rank for each in row] for row in rows]
        image = axes.imshow(parts, aspect="auto", cmap="viridis_r", norm=Normalize(0, 1), interpolation="nearest")
        if len(steps) <= 40:
            for y, row in enumerate(rows):
                for x, each in enumerate(row):
                    ink = "white" if parts[y][x] > 0.55 else "black"
                    axes.text(x, y, str(each.rank_for(SHARE)), ha="center", va="center", fontsize=6.5, color=ink)
        every = max(1, -(-len(steps) // TICKS))
        axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]], fontsize=8)
        axes.set_yticks(
            range(len(linears)), [f"{name} ({row[0].full_rank})" for name, row in zip(linears, rows, strict=True)]
        )
        axes.set_xlabel("step (unrolled depth)")
        axes.set_ylabel("linear (full rank)")
        axes.set_title(f"{init} initialisation", fontsize=10.5)
        for x, (here, after) in enumerate(zip(rows[0], rows[0][1:], strict=False)):
            if here.recursion != after.recursion:
                axes.axvline(x + 0.5, color="white", linewidth=1.6)
    figure.colorbar(image, ax=figure.axes, label="rank, as a part of the full rank", shrink=0.9)
    save_figure(figure, f"{shortened(name)}: rank for {SHARE:.0%} of the residual's energy ({_plan(numbers)})", out)


def _plan(numbers: WeightNumbers) -> str:
    return f"{numbers.sharing}, {numbers.layout} layers looped {numbers.recursions} times"


def run(options: AnalyzeWeights) -> int:
    inits = check_inits(options.init)
    options.use_threads()
    base = open_plain(options.model)
    plan = options.plan.build_plan(base.architecture.layers)
    with progress_bar("spectra", unit="linears") as update:
        numbers = measure(base, plan, inits, on_linear=update)
    about = About(
        model=options.model,
        name=model_name(options.model),
        plan=f"{plan.layout} layers looped {plan.recursions} times ({plan.sharing})",
        dtype=str(base.dtype).removeprefix("torch."),
        device="cpu",
        data=[],
        version=__version__,
    )
    files = write_weights(numbers, about, options.directory, options.force)
    return finish(options, about, numbers.summary(), [rank_table(numbers), kind_table(numbers)], files)


TEMPLATE = """\
{% extends "base" %}
{% block title %}{{ about.name }}: what tying takes away{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: what rank do I need?</h1>
<p class="note">{{ about.model }} ({{ about.dtype }}), tied as {{ about.plan }}.</p>
<figure><img src="{{ images.energy }}" alt="Captured energy by rank for each kind of linear">
<figcaption>The residual of a step is the base layer in its place less the tied weight. A LoRA or DoRA that starts from its
SVD captures its largest singular values. A curve that rises early says that a small rank gives most back.</figcaption>
</figure>
{{ table(ranks) }}
<figure><img src="{{ images.ranks }}" alt="The rank that each linear of each step needs">
<figcaption>The rank for nine tenths of a residual's energy, by linear and step. 0 is a step that tying takes nothing from:
it starts as the base layer itself. White lines part the recursions.</figcaption></figure>
{{ table(kinds) }}
<dl>
<dt>energy</dt><dd>The sum of squared singular values.</dd>
<dt>lost norm</dt><dd>The residual's norm against that of the base layer's own weight, as a mean over the steps.</dd>
<dt>rank for</dt><dd>What the step that needs most needs.</dd>
<dt>added</dt><dd>Parameters of such a LoRA on every linear of every shared step. Norms and biases stay tied.</dd>
</dl>
<p class="note">Energy says how much of a matrix comes back, not how much of a model's quality: training moves what is
left.</p>
{% endblock %}
"""
