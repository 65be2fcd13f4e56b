"""The exits' record as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def table(record: dict[str, Any]) -> str:
    lines = ["# SmolLM2-135M, leaving early", ""]
    for device, place in record["runs"].items():
        lines += _device(device, place)
    return "\n".join(lines) + "\n"


def _device(device: str, place: dict[str, Any]) -> list[str]:
    where, settings = place["environment"], place["settings"]
    threads = f", {where['threads']} threads" if device == "cpu" else ", compiled layers, captured graphs"
    lines = [
        f"## {where['device']}{threads}",
        "",
        f"torch {where['torch']}, {where['date']}, commit {place['revision']}. {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens from held-out documents, {settings['new_tokens']} new each, greedy, one row, "
        f"at most {settings['max_stack']} drafts.",
        "Speed is against full decoding of the same row. Same: texts that are full decoding's to the last token. Agreement:",
        "tokens that the full model, reading the text, would have chosen too; perplexity is the full model's of the text.",
        "",
        "| exit | adapter | mode | threshold | ms/token | speed | left early | drafts kept | deep passes | same | agreement "
        "| perplexity |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in place["exits"].items():
        size = f"{found['adapter_bytes'] / 1e6:.2f} MB"
        full, static = found["full"], found["static"]
        speed = full["ms_per_token"] / static["ms_per_token"]
        tail = f"| {full['agreement']:.1%} | {full['perplexity']:.2f} |"
        lines.append(f"| {name} | {size} | full | - | {full['ms_per_token']:.3f} | 1.00 | - | - | - | - {tail}")
        lines.append(f"| {name} | | up to the exit only | - | {static['ms_per_token']:.3f} | {speed:.2f} | | | | | | |")
        for mode in ("speculative", "parallel"):
            lines += [_row(name, mode, label, figures) for label, figures in found[mode].items()]
    return [*lines, ""]


def _row(name: str, mode: str, label: str, figures: dict[str, Any]) -> str:
    threshold = f"{figures['threshold']:.2f}{', adaptive' if label == 'adaptive' else ''}"
    cells = [
        name,
        "",
        mode,
        threshold,
        f"{figures['ms_per_token']:.3f}",
        f"{figures['speedup']:.2f}",
        f"{figures['exit_rate']:.1%}",
        f"{figures['acceptance']:.1%}" if "acceptance" in figures else "-",
        f"{figures['deep_passes']:.2f}",
        f"{figures['same_texts']:.0%}",
        f"{figures['agreement']:.1%}" if "agreement" in figures else "-",
        f"{figures['perplexity']:.2f}" if "perplexity" in figures else "-",
    ]
    return f"| {' | '.join(cells)} |"


def picture(record: dict[str, Any], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(record["runs"])
    figure = Figure(figsize=(13, 4.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, squeeze=False)
    for (left, right), place in zip(panels, record["runs"].values(), strict=True):
        device = place["environment"]["device"]
        for name, found in place["exits"].items():
            drafts = sorted(found["speculative"].values(), key=lambda one: one["threshold"])
            left.plot([d["threshold"] for d in drafts], [d["speedup"] for d in drafts], marker="o", label=name)
            kept = sorted(found["parallel"].values(), key=lambda one: one["threshold"])
            right.plot([k["agreement"] for k in kept], [k["speedup"] for k in kept], marker="o", label=name)
        left.set_title(f"Speculative: full decoding's text ({device})")
        left.set_xlabel("threshold at which a draft is made")
        right.set_title(f"Parallel: the exit's choices stay ({device})")
        right.set_xlabel("agreement with the full model")
        for axes in (left, right):
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set_ylabel("speed against full decoding")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    figure.savefig(out, dpi=130)
