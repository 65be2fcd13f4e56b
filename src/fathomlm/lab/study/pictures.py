"""A study in a picture: losses over tokens, or over sizes under equal FLOPs with their fits, beside the differences to the
baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fathomlm.lab.analyze.scaling import ScalingFit, architecture_name
from fathomlm.lab.drawing import DASHES, LINES, MARKERS, STAR, check_matplotlib, new_figure, plain_axes, save_figure
from fathomlm.lab.study.differences import gap
from fathomlm.lab.study.results import Results, Row

LABELS = 0.72
"""Inches that the sizes and the name of their axis take."""
BESIDE = 8
"""The most curves whose names find room between them."""
TICK_APART = 1.05
"""The least ratio of two sizes that are both named on an axis: names that are nearer lie over each other."""


def tokens(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,.0f}"


def draw(results: Results, out: Path) -> None:
    """Write a picture of what is finished; there must be something."""
    check_matplotlib()
    several = len(results.study.budgets) > 1
    count = sum(bool(row.records) for row in results.rows)
    figure = new_figure(13, max(6.0 if several else 4.8, 1.6 + (0.28 if several else 0.36) * count))
    left, right = figure.subplots(1, 2)
    if results.over_sizes:
        _sizes(left, results)
    elif (exit_name := only_exit(results)) is not None:
        _two_outputs(left, results, exit_name)
    else:
        _curves(left, results)
    _differences(right, results)
    save_figure(figure, results.study.title, out, dpi=120)


def _curves(axes: Any, results: Results) -> None:
    """Validation losses over tokens, means over seeds; of each variant the longest run."""
    finals, highest = [], 0.0
    longest = {row.variant.name: row for row in sorted(results.rows, key=lambda row: row.job.tokens) if row.records}
    for number, row in enumerate(longest.values()):
        at: dict[int, list[float]] = {}
        for record in row.records.values():
            for point in record["validation"]:
                at.setdefault(point["tokens"], []).append(point["loss"])
        shared = {x: fmean(losses) for x, losses in sorted(at.items()) if len(losses) == len(row.records)}
        loss = row.mean()
        assert loss is not None
        finals.append(loss)
        highest = max(highest, *shared.values())
        axes.plot(
            [x / 1e6 for x in shared], list(shared.values()), linestyle=DASHES[number // len(LINES) % len(DASHES)],
            color=LINES[number % len(LINES)], marker=MARKERS[number % len(MARKERS)], markersize=3, linewidth=1.2,
            label=f"{label_of(results, row)}: {loss:.4f}",
        )  # fmt: skip
    top = max(finals) + max(0.6, 2 * (max(finals) - min(finals)))
    axes.set_ylim(min(finals) - 0.05, min(top, highest + 0.05))
    if len(finals) > BESIDE:
        _legend_below(axes)
    else:
        axes.legend(fontsize=7.5)
    title = "Validation loss, mean over seeds (routed models: causal)"
    plain_axes(axes, title, "tokens seen (millions)", "loss (nats per token)")


def only_exit(results: Results) -> str | None:
    """The one exit that all variants have, where runs were validated at their end alone, so that there are no curves."""
    done = [row for row in results.rows if row.records]
    exits = {index for row in done for index in row.job.shaped.parts.plan.exits}
    curves = any(len(record["validation"]) > 1 for row in done for record in row.records.values())
    name = f"exit_{min(exits, default=0) + 1}"
    return name if len(exits) == 1 and not curves and all(row.mean(name) is not None for row in done) else None


def _two_outputs(axes: Any, results: Results, name: str) -> None:
    """What one output's loss costs the other's."""
    for number, row in enumerate(row for row in results.rows if row.records):
        last, exit = row.mean(), row.mean(name)
        assert last is not None
        assert exit is not None
        axes.plot(
            last, exit, linestyle="none", color=LINES[number % len(LINES)], marker=MARKERS[number % len(MARKERS)],
            fillstyle="full" if number < len(LINES) else "none", label=f"{label_of(results, row)}: {last:.3f}, {exit:.3f}",
        )  # fmt: skip
    _legend_below(axes)
    where = f"behind layer {name.removeprefix('exit_')}"
    plain_axes(
        axes, "Both outputs, mean over seeds", "loss, last output (nats per token)", f"loss, exit {where} (nats per token)"
    )


def _legend_below(axes: Any) -> None:
    """Under the name of the axis, where it hides nothing."""
    from matplotlib.transforms import ScaledTranslation

    below = axes.transAxes + ScaledTranslation(0, -LABELS, axes.figure.dpi_scale_trans)
    axes.legend(fontsize=7.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)


def _sizes(axes: Any, results: Results) -> None:
    """Losses over the logarithm of the size, with the fits; a color for each architecture, a style for each budget."""
    kinds: dict[str, list[Row]] = {}
    for row in (row for row in results.rows if row.records):
        kinds.setdefault(_kind(row), []).append(row)
    fits = {(fit.architecture, round(math.log(fit.flops), 1)): fit for fit in results.fits()}
    for number, (kind, rows) in enumerate(kinds.items()):
        for place, budget in enumerate(results.study.budgets):
            own = sorted((r for r in rows if r.budget == budget), key=_parameters)
            if not own:
                continue
            color, style = LINES[number % len(LINES)], DASHES[place % len(DASHES)]
            x, y = [_parameters(row) / 1e6 for row in own], [row.mean() or math.nan for row in own]
            record = next(iter(own[0].records.values()))
            fit = fits.get((kind, round(math.log(float(record["flops"])), 1)))
            curve = (x, y) if fit is None else _fitted_curve(fit, x)
            marked = {"color": color, "marker": MARKERS[place % len(MARKERS)], "markersize": 5}
            axes.plot(x, y, linestyle="none", **marked)
            axes.plot(*curve, linestyle=style, color=color, linewidth=1.0)
            axes.plot([], [], linestyle=style, linewidth=1.0, label=f"{kind}, {budget.name}: {min(y):.3f}", **marked)
            if fit is not None and fit.inside:
                assert fit.best_parameters is not None
                axes.plot(fit.best_parameters / 1e6, fit.best_loss, color=color, markersize=11, **STAR)
    axes.set_xscale("log")
    from matplotlib.ticker import NullFormatter, NullLocator

    sizes = size_ticks(_parameters(row) / 1e6 for row in results.rows if row.records)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes], rotation=45, fontsize=7)
    _legend_below(axes)
    title = "Loss over size (lowest beside the name; star: the fit's best)"
    plain_axes(axes, title, "parameters without embedding (millions)", "validation loss (nats per token)")


def _fitted_curve(fit: ScalingFit, sizes: Sequence[float]) -> tuple[list[float], list[float]]:
    """A fit between the least and the largest size (millions)."""
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    return grid, [fit.at(1e6 * size) for size in grid]


def size_ticks(sizes: Iterable[float]) -> list[float]:
    """Sizes to be named on a logarithmic axis."""
    found: list[float] = []
    for size in sorted(sizes):
        if not found or size > TICK_APART * found[-1]:
            found.append(size)
    return found


def _differences(axes: Any, results: Results) -> None:
    """Each variant's loss less its baseline's, with the interval and the number beside it."""
    shown = [row for row in results.rows if row.against is not None]
    for place, row in enumerate(reversed(shown)):
        assert row.against is not None
        color = LINES[0] if row.against.half is not None and abs(row.against.mean) > row.against.half else "0.5"
        axes.errorbar(
            row.against.mean, place, xerr=row.against.half, fmt="o", color=color, capsize=3, markersize=4, linewidth=1.2
        )
        axes.annotate(
            gap(row.against), (row.against.mean, place), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_yticks(range(len(shown)), [label_of(results, row) for row in reversed(shown)], fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.margins(x=0.15)  # the numbers beside the outermost points
    first = results.rows[0].job
    under = "" if len(results.study.budgets) > 1 else f", {tokens(first.tokens)} tokens"
    title = f"Loss less that of {results.study.baseline}{under}; 95 %, grey: inside the spread"
    plain_axes(axes, title, "difference (nats per token); left is better")


def label_of(results: Results, row: Row) -> str:
    """A variant, with its budget where there are several."""
    return row.variant.name if len(results.study.budgets) == 1 else f"{row.variant.name}, {row.budget.name}"


def _kind(row: Row) -> str:
    plan = row.job.shaped.parts.plan
    return architecture_name(plan.recursions, plan.routing is not None)


def _parameters(row: Row) -> int:
    return row.job.shaped.cost.non_embedding_parameters
