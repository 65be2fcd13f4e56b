"""The record of pareto.py for people: tables, a page and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_scale_record import Record

from fathomlm.cli.display import Rows
from fathomlm.errors import OptionError
from fathomlm.lab.common import markdown, optional
from fathomlm.lab.drawing import LINES, MARKERS, check_matplotlib, figure_over_table, plain_axes, save_figure


def timed(record: Record) -> dict[str, Record]:
    """The models that have a speed, in the record's order."""
    return {name: model for name, model in record["models"].items() if model["speeds"]}


def full_rows(record: Record) -> Rows:
    """A row for each model at full depth and its best batch size."""
    rows = [["model", "loss, mean over seeds", "seeds", "parameters", "best batch size", "tokens/s", "frontier"]]
    for name, model in timed(record).items():
        cells = [f"{model['loss']:.4f}", str(len(model["seeds"])), f"{model['parameters'] / 1e6:.3g}M"]
        cells += [str(model["best"]["batch_size"]), f"{model['best']['tokens_per_s']:,}"]
        rows.append([name, *cells, "yes" if model["on_the_frontier"] else "no"])
    return rows


def depth_rows(record: Record) -> Rows:
    """A row for each model at each maximum depth."""
    rows = [
        ["model", "at most", "loss, one seed", "log p of a row", "mean depth", "generating", "FLOPs/token", "tokens/s",
         "to full depth", "frontier"]
    ]  # fmt: skip
    for name, model in record["models"].items():
        full = _speed(model["depths"][-1]) if model["depths"] else None
        for at in model["depths"]:
            speed, looped = _speed(at), model["recursions"] > 1
            ratio = None if speed is None or full is None else speed / full
            cells = [f"{at['max_depth']} of {model['recursions']}" if looped else "-", f"{at['loss']:.4f}"]
            cells += [f"{at['log_likelihood']:,.1f}", f"{at['mean_depth']:.2f}" if looped else "-"]
            cells += [optional(at.get("speed", {}).get("mean_depth"), ".2f"), f"{at['flops_per_token'] / 1e6:.3g}M"]
            cells += [optional(speed, ",d"), optional(ratio, ".2f")]
            rows.append([name, *cells, "-" if speed is None else "yes" if at["on_the_frontier"] else "no"])
    return rows


def batch_rows(record: Record) -> Rows:
    """Tokens/s of each model at each batch size."""
    models = timed(record)
    sizes = sorted({int(size) for model in models.values() for size in model["speeds"]})
    rows = [["tokens/s", *(f"batch size {size}" for size in sizes)]]
    for name, model in models.items():
        found = [model["speeds"].get(str(size)) for size in sizes]
        rows.append([name, *("-" if one is None else f"{one['tokens_per_s']:,}" for one in found)])
    return rows


def page(record: Record, own: str, picture: str) -> str:
    """`own` and `picture` are files beside it."""
    lines = [f"# {title_of(record)}", "", f"Made by `benchmarks/pareto.py` from [{own}]({own}).", ""]
    lines += [f"![{title_of(record)}]({picture})", "", "At full depth, each at its best batch size:", ""]
    lines += [*markdown(full_rows(record)), "", *markdown(batch_rows(record)), ""]
    lines += [
        "With at most so many recursions, of the first seed's model (on a GPU with weights in bfloat16). Log-likelihoods "
        f"are sums over a row of {_context(record):,} tokens, in nats; the mean depth is that of the validation rows, and "
        "beside it that of the tokens which the engine generated. The engine limits routed models only. On the frontier is "
        "what no other point beats in both loss and speed:",
        "", *markdown(depth_rows(record)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def title_of(record: Record) -> str:
    where = record["environment"]
    return f"Models of the study {record['settings']['study']} in the engine, {where['device']}, {where['date']}"


def draw(record: Record, out: Path) -> None:
    """Loss against speed at full depth and at each maximum depth, speed by batch size, and what depth adds; the numbers
    under them."""
    check_matplotlib()
    models = timed(record)
    if not models:
        raise OptionError("the record has no speeds to draw yet; call `pareto.py run` again to go on")
    styles = {
        name: {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(record["models"])
    }
    table = depth_rows(record)
    colors = [str(styles[row[0]]["color"]) for row in table[1:]]
    figure, grid = figure_over_table(12.4, [4.2, 4.2], table, colors, columns=2)
    panels = [figure.add_subplot(grid[number // 2, number % 2]) for number in range(4)]
    _full_depth(panels[0], models, styles)
    _batch_sizes(panels[1], models, styles)
    _depths(panels[2], models, styles)
    _log_likelihoods(panels[3], record, styles)
    save_figure(figure, title_of(record), out)


def _full_depth(axes: Any, models: dict[str, Record], styles: dict[str, Any]) -> None:
    points = [(model["best"]["tokens_per_s"] / 1e3, model["loss"]) for model in models.values()]
    _frontier(axes, points)
    for (name, model), (speed, loss) in zip(models.items(), points, strict=True):
        text = f"{name}: {loss:.4f}, {model['best']['tokens_per_s']:,}/s"
        axes.plot([speed], [loss], linestyle="none", markersize=8, label=text, **styles[name])
    axes.margins(0.15)
    axes.legend(fontsize=8)
    title = "Full depth, each model at its best batch size (grey: frontier)"
    plain_axes(axes, title, "speed (thousand tokens/s)", "validation loss (nats per token), mean over seeds")


def _batch_sizes(axes: Any, models: dict[str, Record], styles: dict[str, Any]) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    for name, model in models.items():
        sizes = sorted(map(int, model["speeds"]))
        speeds = [model["speeds"][str(size)]["tokens_per_s"] / 1e3 for size in sizes]
        axes.plot(sizes, speeds, linewidth=1.2, markersize=4, label=name, **styles[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({int(size) for model in models.values() for size in model["speeds"]}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    plain_axes(axes, "Speed by batch size, full depth", "batch size (tokens of a forward pass)", "speed (thousand tokens/s)")


def _depths(axes: Any, models: dict[str, Record], styles: dict[str, Any]) -> None:
    """A line for each model from its least depth to its full one, a point's number the recursions that tokens may run."""
    found = {
        name: [(speed / 1e3, at["loss"]) for at in model["depths"] if (speed := _speed(at)) is not None]
        for name, model in models.items()
    }
    _frontier(axes, [point for points in found.values() for point in points])
    for name, points in found.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.2, markersize=6, label=name, **styles[name])
        numbers = [at["max_depth"] for at in models[name]["depths"] if _speed(at) is not None]
        for number, point in zip(numbers, points, strict=True):
            if models[name]["recursions"] > 1:
                axes.annotate(
                    str(number), point, (5, 5), textcoords="offset points", fontsize=8, color=styles[name]["color"]
                )
    axes.margins(0.12)
    axes.legend(fontsize=8)
    title = "At most so many recursions as the number beside a point"
    plain_axes(axes, title, "speed (thousand tokens/s)", "validation loss (nats per token), one seed")


def _log_likelihoods(axes: Any, record: Record, styles: dict[str, Any]) -> None:
    """Thesis 4.6.3: the log-likelihood of a row by maximum depth; plain models have one depth, as a line."""
    deepest = max(model["recursions"] for model in record["models"].values())
    for name, model in record["models"].items():
        values = [at["log_likelihood"] for at in model["depths"]]
        if len(values) == 1:
            axes.axhline(values[0], color=styles[name]["color"], linewidth=1.0, linestyle="--", label=name)
        elif values:
            axes.plot(range(1, len(values) + 1), values, linewidth=1.2, markersize=6, label=name, **styles[name])
    axes.set_xticks(range(1, deepest + 1))
    axes.legend(fontsize=8)
    title = f"Log-likelihood of a row of {_context(record):,} tokens (dashed: plain models)"
    plain_axes(axes, title, "recursions at most", "sum of log p (nats)")


def _frontier(axes: Any, points: list[tuple[float, float]]) -> None:
    """Stairs through the points that no other beats in both speed and loss."""
    best = [one for one in sorted(points) if not any(it[0] >= one[0] and it[1] < one[1] for it in points)]
    if best:
        x, y = [speed for speed, _ in best], [loss for _, loss in best]
        axes.step(x, y, where="pre", color="0.75", linewidth=4, solid_capstyle="round", zorder=0)


def _speed(at: Record) -> int | None:
    return at["speed"]["tokens_per_s"] if "speed" in at else None


def _context(record: Record) -> int:
    return int(next(at["context"] for model in record["models"].values() for at in model["depths"]))
