"""The bundled model's record as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {"mor": "MoR, 1+4+1 layers looped 3 times", "vanilla": "plain, as deep"}
COLOURS = {"mor": "tab:orange", "vanilla": "black"}


def table(record: dict[str, Any]) -> str:
    runs = record["runs"]
    first = next(iter(runs.values()))
    where, tokens, settings = first["environment"], first["training"][-1]["tokens"], first["settings"]
    lines = [
        "# The bundled model",
        "",
        f"Trained on {first['trained_on']}, seed {first['seed']}: {tokens / 1e6:,.0f}M tokens, "
        f"{settings['sequences']} rows of {settings['context']} a step, AdamW {settings['lr']:g}, trapezoid, bf16. "
        f"Measured on {where['device']}, torch {where['torch']}, {where['date']}, commit {first['revision']}.",
        "Losses are in nats a token on held-out documents (in brackets: rows of them, where not all models have the same): "
        "causal, as a model is used, and by top-k, as it was trained; at the end of the run causal too, in bf16, on the "
        "same rows for all. Bytes are of the int8 files, FLOPs forward, without the head.",
        *_engine(record.get("engine", {})),
        "",
        "| model | weights | with embedding | MFLOPs/token | end of the run | causal | top-k | int8: causal | int8: MB "
        "| engine: tokens/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    many = {name: {run[name].get("rows") for run in runs.values()} for name in ("validation", "int8")}
    for name, run in runs.items():
        rows = {kind: f" ({run[kind]['rows']})" if len(found) > 1 else "" for kind, found in many.items()}
        cells = [
            f"{run['non_embedding_parameters'] / 1e6:.1f}M",
            f"{run['parameters'] / 1e6:.1f}M",
            f"{run['forward_flops_per_token'] / 1e6:.1f}",
            f"{_validation_loss(run['validations'][-1]):.4f}",
            f"{run['validation']['causal']:.4f}{rows['validation']}",
            f"{run['validation']['top_k']:.4f}{rows['validation']}" if "top_k" in run["validation"] else "-",
            f"{run['int8']['causal']:.4f}{rows['int8']}",
            f"{sum(run['int8']['files'].values()) / 1e6:.2f}",
            _speed(record.get("engine", {}).get(name, {})),
        ]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    if "mor" in runs:
        lines += _depths(runs["mor"]["depth"])
    for name, run in runs.items():
        lines += ["", f"## Texts: {NAMES[name]}", "", "Sampled at temperature 0.8, top-p 0.95, not chosen.", ""]
        lines += [f"- **{text['prompt']}**{_one_line(text['text'])}" for text in run["texts"]]
    return "\n".join(lines) + "\n"


def _engine(engine: dict[str, Any]) -> list[str]:
    """What was asked of the engine, where it was asked."""
    asked = next((engine[name]["workload"] for name in NAMES if "workload" in engine.get(name, {})), None)
    if asked is None:
        return []
    where = engine["environment"]
    return [
        f"Engine: `fathomlm bench throughput`, both in one run on {where['device']}, torch {where['torch']}, "
        f"{engine['dtype']}, {where['date']}: {asked['requests']:,} requests that arrive {asked['arrivals']}, "
        f"{asked['new_tokens']:,} new tokens."
    ]


def _validation_loss(validation: dict[str, float]) -> float:
    """Of a validation while training: a routed model's causal loss, another's only one."""
    return validation.get("causal", validation["next_token"])


def _speed(engine: dict[str, Any]) -> str:
    return f"{engine['timing']['tokens_per_s']:,.0f}" if "timing" in engine else engine.get("cannot", "not yet")


def _depths(depth: dict[str, Any]) -> list[str]:
    deep, shallow = (", ".join(f"`{_one_line(text)}` {mean:.2f}" for text, _, mean in depth[k]) for k in LISTS)
    lines = [
        "",
        "## What the deep tokens are",
        "",
        "The loss is of the token behind the one that stands there: with the recursions that its router asked for, and with",
        "one only.",
        "",
        "| token | share of all | mean depth | loss | with one recursion |",
        "|---|--:|--:|--:|--:|",
    ]
    total = sum(found["count"] for found in depth["classes"].values())
    for name, found in depth["classes"].items():
        lines.append(f"| {name} | {found['count'] / total:.1%} | {found['mean_depth']:.3f} | {_losses(found)} |")
    for number, found in depth["by_depth"].items():
        lines.append(f"| all of depth {number} | {found['share']:.1%} | {number} | {_losses(found)} |")
    return [*lines, "", f"Deepest: {deep}.", "", f"Shallowest: {shallow}."]


LISTS = ("deepest", "shallowest")


def _losses(found: dict[str, float]) -> str:
    return f"{found['loss']:.3f} | {found['loss_at_depth_1']:.3f}"


def _one_line(text: str) -> str:
    return text.replace("\n", " / ").replace("|", "\\|")


def picture(record: dict[str, Any], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = record["runs"]
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    finals = []
    for name, run in runs.items():
        x = [r["tokens"] / 1e6 for r in run["validations"]]
        y = [_validation_loss(r) for r in run["validations"]]
        finals.append(y[-1])
        left.plot(x, y, color=COLOURS[name], marker="o", markersize=3, label=f"{NAMES[name]}: {y[-1]:.3f}")
    left.set_ylim(min(finals) - 0.1, min(finals) + 1.5)
    left.set_title("Validation loss (MoR: causal)")
    left.set_xlabel("tokens seen (millions)")
    left.set_ylabel("loss (nats a token)")
    left.legend(fontsize=8)
    if "mor" in runs:
        _draw_classes(right, runs["mor"]["depth"]["classes"])
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"The bundled model ({next(iter(runs.values()))['settings']['context']} tokens of context)")
    figure.savefig(out, dpi=130)


def _draw_classes(axes: Any, classes: dict[str, Any]) -> None:
    """How the tokens of each class share out over depths, deepest class at the top."""
    names = list(classes)[::-1]
    start = [0.0] * len(names)
    depths = len(classes[names[0]]["shares"])
    for depth in range(depths):
        widths = [classes[name]["shares"][depth] for name in names]
        if sum(widths):
            axes.barh(names, widths, left=start, label=f"depth {depth}", color=str(0.95 - 0.8 * depth / depths))
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_title("Depth by the token that stands there")
    axes.set_xlabel("part of the tokens")
    axes.legend(fontsize=8, loc="lower right")
