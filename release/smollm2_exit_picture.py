"""The exits' record as a picture: speed by threshold, and speed by agreement, for each device and kind of prompt; and how
much of the next word each layer knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smollm2_exit_report import fastest

STYLES = ("-", "--", ":", "-.")


def picture(record: dict[str, Any], out: Path) -> None:
    """A row for each device and kind of prompt. The legend has the numbers: the best speed of each line, and where."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(place, kind) for place in record["runs"].values() for kind in place["settings"]["prompts_from"]]
    most = max(len(place["exits"]) for place, _ in rows)
    known = record.get("readout")
    figure = Figure(figsize=(15, max(4.4, 1.6 + 0.2 * most) * (len(rows) + (known is not None))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("SmolLM2-135M leaving early: one row, greedy, speed against full decoding")
    panels = figure.subplots(len(rows) + (known is not None), 2, squeeze=False)
    if known is not None:
        _draw_known(panels[-1][0], known, trained(record))
        panels[-1][1].set_visible(False)
    for (left, right), (place, kind) in zip(panels, rows, strict=False):
        _draw(left, place, kind, "speculative", "threshold")
        _draw(right, place, kind, "parallel", "agreement")
        device = f"{place['environment']['device']}, {place['settings']['dtype']}"
        rounding = "" if place["settings"]["dtype"] == "float32" else ", but for rounding"
        left.set_title(f"{device}, {kind}\nSpeculative: the text is full decoding's{rounding}", fontsize=10, loc="left")
        left.set_xlabel("threshold: a draft is made where the exit is surer (0: always)")
        right.set_title(f"{device}, {kind}\nParallel: the exit's choices stay", fontsize=10, loc="left")
        right.set_xlabel("agreement: part of the tokens that the full model would choose")
    figure.savefig(out, dpi=130)


def trained(record: dict[str, Any]) -> dict[str, dict[int, float]]:
    """How often exits agree with the last layer on held-out chats, by design and layer."""
    found: dict[str, dict[int, float]] = {}
    for place in record["runs"].values():
        for one in place["exits"].values():
            if "chats" in one["kinds"]:
                layers = found.setdefault(one["design"], {})
                layers[one["layer"]] = one["kinds"]["chats"]["held_out"]["agreement"]
    return found


def _draw_known(axes: Any, known: dict[str, Any], exits: dict[str, dict[int, float]]) -> None:
    layers = [int(layer) for layer in known["layers"]]
    axes.plot(
        layers, [one["agreement"] for one in known["layers"].values()], marker="o", markersize=4, label="linear reading"
    )
    for design, of_layer in exits.items():
        told = ", ".join(f"{layer}: {agreement:.0%}" for layer, agreement in sorted(of_layer.items()))
        axes.plot(list(of_layer), list(of_layer.values()), "s", color="C3", label=f"exits, {design} ({told})")
    depth = [layer / (max(layers) + 1) for layer in layers]
    axes.plot(layers, depth, color="black", linewidth=0.8, linestyle="--", label="part of the layers run")
    axes.set_title(
        "What each layer knows: how often the best linear reading chooses what the last layer chooses\n"
        "Drafting gains where an exit agrees more often than its share of the work",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("part of the tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw(axes: Any, place: dict[str, Any], kind: str, mode: str, across: str) -> None:
    designs = sorted({found["design"] for found in place["exits"].values()})
    layers = sorted({found["layer"] for found in place["exits"].values()})
    marks = sorted({(found["words"], found["max_stack"]) for found in place["exits"].values()})
    for name, found in place["exits"].items():
        points = sorted(found["kinds"][kind].get(mode, {}).values(), key=lambda one: one["threshold"])
        best = fastest(found["kinds"][kind].get(mode, {}))
        if best is None:
            continue
        mark = "osv^DPX"[marks.index((found["words"], found["max_stack"])) % 7]
        axes.plot(
            [one[across] for one in points],
            [one["speedup"] for one in points],
            color=f"C{designs.index(found['design'])}",
            linestyle=STYLES[layers.index(found["layer"]) % len(STYLES)],
            marker=mark,
            markersize=4,
            label=f"{name}: {best['speedup']:.2f}x at {best[across]:.2f}",
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speed (1 = full decoding)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="best of each", title_fontsize=8)
