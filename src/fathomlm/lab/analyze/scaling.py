"""Which model size a compute budget is best spent on, from finished runs (thesis 4.6.1 "Compute-optimal Scaling Analysis").

The runs of one architecture under one budget lie on a curve over the logarithm of their parameters, which has its lowest
point where neither a larger model nor more tokens would have helped. As in the thesis a polynomial is laid through them; a
quadratic, as three sizes are enough for one. The picture is `fig_mor:isoflops_qualitative-a`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fathomlm.cli.display import Rows
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.runs import RecordedRun, read_runs, summarise
from fathomlm.lab.common import amount
from fathomlm.lab.drawing import DASHES, LINES, MARKERS, STAR, figure_over_table, plain_axes, save_figure

SAME_BUDGET = 0.05
"""Runs whose FLOPs differ by less than this part of the smaller count as of one budget: lengths are whole steps."""
LEAST = 3
"""Sizes that a quadratic needs."""
POINTS = 100
"""Of a fitted curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run in the numbers that a fit needs."""

    run: str
    architecture: str
    """vanilla, recursive or mor, with the number of recursions: "mor 3"."""
    non_embedding_parameters: int
    flops: float
    """Forward FLOPs that were spent, as the thesis counts."""
    tokens: int
    loss: float
    """The last validation loss, in nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFit:
    """The best size for one architecture under one budget."""

    architecture: str
    flops: float
    """The mean of the runs'."""
    runs: list[str]
    sizes: list[int]
    losses: list[float]
    coefficients: list[float] | None
    """loss = a x^2 + b x + c over x = ln(parameters), in this order; None with fewer than three sizes."""
    best_parameters: float | None
    """Where the curve is lowest; None where it is not curved upwards."""
    best_loss: float | None
    best_tokens: float | None
    """What the budget buys at that size, between the neighbouring runs in proportion to their logarithms."""
    inside: bool | None
    """Whether that lies between the smallest and the largest run: beyond them it is a guess."""

    def at(self, parameters: float) -> float:
        """The fitted loss of a size."""
        assert self.coefficients is not None
        return float(np.polyval(self.coefficients, math.log(parameters)))


def read_finished(paths: Sequence[Path]) -> list[FinishedRun]:
    """The runs at some paths. Each needs the recipe that it was started with, and a validation loss."""
    return [_finished(run, run.file.with_name("recipe.yaml")) for run in read_runs(paths)]


def _finished(run: RecordedRun, recipe_file: Path) -> FinishedRun:
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.student import read_student

    if not recipe_file.is_file():
        raise OptionError(f"run {run.name} has no {recipe_file.name} beside its records, so its size is not known")
    summary = summarise(run)
    if summary.validation is None:
        raise OptionError(f"run {run.name} was never validated; a fit requires its validation loss")
    flops = next((float(record["flops"]) for record in reversed(run.validation) if record.get("flops")), None)
    if flops is None:
        raise OptionError(f"run {run.name} has no record of its FLOPs")
    parts = read_student(read_recipe(recipe_file))
    cost = count(parts.architecture, parts.plan, relaxation=parts.relaxation)
    return FinishedRun(
        run=run.name,
        architecture=architecture_name(parts.plan.recursions, parts.plan.routing is not None),
        non_embedding_parameters=cost.non_embedding_parameters,
        flops=flops,
        tokens=summary.tokens,
        loss=summary.validation,
    )


def architecture_name(recursions: int, routed: bool) -> str:
    """What a fit is of: vanilla, "recursive 3" or "mor 3"."""
    return "vanilla" if recursions == 1 else f"{'mor' if routed else 'recursive'} {recursions}"


def fit_runs(runs: Iterable[FinishedRun]) -> list[ScalingFit]:
    """A fit for each architecture and budget, small budgets first."""
    by_kind: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_kind.setdefault(run.architecture, []).append(run)
    fits = [_fit(kind, group) for kind, members in by_kind.items() for group in _budgets(members)]
    return sorted(fits, key=lambda fit: (fit.architecture, fit.flops))


def _budgets(runs: Sequence[FinishedRun]) -> list[list[FinishedRun]]:
    """Runs that spent about the same, together."""
    groups: list[list[FinishedRun]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops <= groups[-1][0].flops * (1 + SAME_BUDGET):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _fit(architecture: str, runs: Sequence[FinishedRun]) -> ScalingFit:
    ordered = sorted(runs, key=lambda run: run.non_embedding_parameters)
    sizes, losses = [run.non_embedding_parameters for run in ordered], [run.loss for run in ordered]
    x = np.log(np.array(sizes, dtype=np.float64))
    coefficients, lowest = None, None
    if len(set(sizes)) >= LEAST:
        middle = float(x.mean())  # a polynomial around 0 of numbers near 18 loses digits
        a, b, c = (float(value) for value in np.polyfit(x - middle, np.array(losses), 2))
        coefficients = [a, b - 2 * a * middle, c - b * middle + a * middle**2]
        lowest = middle - b / (2 * a) if a > 0 else None
    tokens = None if lowest is None else _tokens_at(lowest, x, np.log([run.tokens for run in ordered]))
    return ScalingFit(
        architecture=architecture,
        flops=sum(run.flops for run in runs) / len(runs),
        runs=[run.run for run in ordered],
        sizes=sizes,
        losses=losses,
        coefficients=coefficients,
        best_parameters=None if lowest is None else math.exp(lowest),
        best_loss=None if lowest is None or coefficients is None else float(np.polyval(coefficients, lowest)),
        best_tokens=tokens,
        inside=None if lowest is None else bool(x[0] <= lowest <= x[-1]),
    )


def _tokens_at(lowest: float, x: Any, log_tokens: Any) -> float:
    """Beyond the runs along the line of the two outermost."""
    slope, start = np.polyfit(x, log_tokens, 1)
    inside = x[0] <= lowest <= x[-1]
    return math.exp(float(np.interp(lowest, x, log_tokens)) if inside else float(slope * lowest + start))


def fit_table(fits: Sequence[ScalingFit]) -> Rows:
    table = [["architecture", "FLOPs", "runs", "sizes", "best size", "best loss", "tokens there"]]
    for fit in fits:
        sizes = f"{amount(fit.sizes[0])} to {amount(fit.sizes[-1])}"
        table.append([fit.architecture, f"{fit.flops:.3g}", str(len(fit.runs)), sizes, *_best(fit)])
    return table


def _best(fit: ScalingFit) -> list[str]:
    if fit.coefficients is None:
        return ["too few sizes", "-", "-"]
    if fit.best_parameters is None or fit.best_loss is None or fit.best_tokens is None:
        return ["no lowest point", "-", "-"]
    note = "" if fit.inside else " (beyond the runs)"
    return [f"{amount(fit.best_parameters)}{note}", f"{fit.best_loss:.4f}", amount(fit.best_tokens)]


def draw_scaling_fits(fits: Sequence[ScalingFit], out: Path, kind: str = "png") -> None:
    """Loss over model size: a color and a mark for each architecture, a line style for each budget, stars where a curve is
    lowest."""
    kinds = sorted({fit.architecture for fit in fits})
    colours = {name: LINES[i % len(LINES)] for i, name in enumerate(kinds)}
    figure, grid = figure_over_table(10.4, [5.2], fit_table(fits), [colours[fit.architecture] for fit in fits])
    axes = figure.add_subplot(grid[0])
    for name in kinds:
        own = sorted((fit for fit in fits if fit.architecture == name), key=lambda fit: fit.flops)
        for place, fit in enumerate(own):
            dash = DASHES[place % len(DASHES)]
            _draw_fit(axes, fit, colours[name], MARKERS[kinds.index(name) % len(MARKERS)], dash)
        stars = [(fit.best_parameters, fit.best_loss) for fit in own if fit.inside]
        if len(stars) > 1:
            label = f"{name}: the best sizes"
            axes.plot(*zip(*stars, strict=True), color=colours[name], linewidth=2.4, alpha=0.35, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, place: amount(value))
    axes.xaxis.set_minor_formatter(lambda value, place: amount(value) if str(value)[0] in "25" else "")
    plain_axes(axes, x="parameters without embeddings", y="validation loss (nats per token)")
    axes.legend(fontsize=8, framealpha=0.85)
    save_figure(figure, "Loss by model size under equal compute; stars are the lowest points of the fits", out, kind)


def _draw_fit(axes: Any, fit: ScalingFit, colour: str, mark: str, dash: Any) -> None:
    label = f"{fit.architecture}, {fit.flops:.3g} FLOPs"
    alone = fit.coefficients is None
    axes.plot(fit.sizes, fit.losses, color=colour, marker=mark, linestyle="none", label=label if alone else None)
    if alone:
        return
    ends = [*fit.sizes, *([fit.best_parameters] if fit.inside and fit.best_parameters is not None else [])]
    low, high = math.log(min(ends)), math.log(max(ends))
    xs = [math.exp(low + (high - low) * at / POINTS) for at in range(POINTS + 1)]
    axes.plot(xs, [fit.at(x) for x in xs], color=colour, linestyle=dash, linewidth=1.5, label=label)
    if fit.inside:
        axes.plot([fit.best_parameters], [fit.best_loss], color=colour, markersize=15, zorder=4, **STAR)
