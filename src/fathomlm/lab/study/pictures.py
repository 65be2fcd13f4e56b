"""A study as a picture: curves and differences, or losses over sizes where there are several budgets."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from fathomlm.lab.drawing import DASHES, LINES, MARKERS, check_matplotlib, new_figure, plain_axes, save_figure
from fathomlm.lab.study.results import Results, Row
from fathomlm.lab.study.tables import gap, tokens


def draw(results: Results, out: Path) -> None:
    """Write a picture of what is finished; there must be something."""
    check_matplotlib()
    several = len(results.study.budgets) > 1
    count = sum(bool(row.records) for row in results.rows)
    figure = new_figure(13, 6.0 if several else max(4.8, 1.6 + 0.36 * count))
    left, right = figure.subplots(1, 2)
    if several:
        _sizes(left, results)
    else:
        _curves(left, results)
    _differences(right, results)
    save_figure(figure, results.study.title, out, dpi=120)


def _curves(axes: Any, results: Results) -> None:
    """Validation losses over tokens, means over seeds."""
    finals = []
    for number, row in enumerate(row for row in results.rows if row.records):
        at: dict[int, list[float]] = {}
        for record in row.records.values():
            for point in record["validation"]:
                at.setdefault(point["tokens"], []).append(point["loss"])
        shared = {x: fmean(losses) for x, losses in sorted(at.items()) if len(losses) == len(row.records)}
        loss = row.mean()
        assert loss is not None
        finals.append(loss)
        axes.plot(
            [x / 1e6 for x in shared], list(shared.values()), linestyle=DASHES[number // len(LINES) % len(DASHES)],
            color=LINES[number % len(LINES)], marker=MARKERS[number % len(MARKERS)], markersize=3, linewidth=1.2,
            label=f"{row.variant.name}: {loss:.4f}",
        )  # fmt: skip
    axes.set_ylim(min(finals) - 0.05, max(finals) + max(0.6, 2 * (max(finals) - min(finals))))
    axes.legend(fontsize=7.5, ncols=2 if len(finals) > 7 else 1)
    title = "Validation loss, mean over seeds (routed models: causal)"
    plain_axes(axes, title, "tokens seen (millions)", "loss (nats per token)")


def _sizes(axes: Any, results: Results) -> None:
    """Losses over the logarithm of the size, with the fits; a colour for each architecture, a style for each budget."""
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
            axes.plot(x, y, MARKERS[place % len(MARKERS)], color=color, markersize=5)
            record = next(iter(own[0].records.values()))
            fit = fits.get((kind, round(math.log(float(record["flops"])), 1)))
            label = f"{kind}, {budget.name}: {min(y):.3f}"
            if fit is None:
                axes.plot(x, y, linestyle=style, color=color, linewidth=1.0, label=label)
            else:
                grid = [x[0] * (x[-1] / x[0]) ** (i / 60) for i in range(61)]
                axes.plot(
                    grid, [fit.at(1e6 * size) for size in grid], linestyle=style, color=color, linewidth=1.0, label=label
                )
    axes.set_xscale("log")
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({round(_parameters(row) / 1e6, 1) for row in results.rows if row.records}))
    axes.tick_params(axis="x", labelsize=7, rotation=45)
    axes.legend(fontsize=7.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    title = "Loss over size under equal budgets (lowest beside the name)"
    plain_axes(axes, title, "parameters without embedding (millions)", "validation loss (nats per token)")


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
    several = len(results.study.budgets) > 1
    names = [f"{row.variant.name}, {row.budget.name}" if several else row.variant.name for row in reversed(shown)]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.margins(x=0.15)  # the numbers beside the outermost points
    first = results.rows[0].job
    under = "" if several else f", {tokens(first.tokens)} tokens"
    title = f"Loss less that of {results.study.baseline}{under}; 95 %, grey: inside the spread"
    plain_axes(axes, title, "difference (nats per token); left is better")


def _kind(row: Row) -> str:
    plan = row.job.shaped.parts.plan
    if plan.recursions == 1:
        return "vanilla"
    return f"{'recursive' if plan.routing is None else 'mor'} {plan.recursions}"


def _parameters(row: Row) -> int:
    return row.job.shaped.cost.non_embedding_parameters
