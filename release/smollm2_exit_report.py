"""The exits' record as tables, and the exit that it says to ship."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

AGREES = 0.95
"""Parallel decoding counts where the full model would have chosen this part of the tokens."""
Found = dict[str, Any]


def entry_name(found: Found) -> str:
    """What an entry of the record is known by."""
    words = f", {found['words']:,} words" if found["words"] else ""
    return f"layer {found['layer']}, {found['design']}{words}, {found['max_stack']} drafts"


def table(record: dict[str, Any]) -> str:
    lines = ["# SmolLM2-135M, leaving early", ""]
    for device, place in record["runs"].items():
        lines += [*_heading(device, place), *_summary(place), ""]
    lines += _training(record.get("training", {}))
    lines += [] if "readout" not in record else _readout(record["readout"])
    lines += ["# All that was measured", ""]
    for place in record["runs"].values():
        for kind in place["settings"]["prompts_from"]:
            lines += _details(place, kind)
    return "\n".join(lines) + "\n"


def _training(runs: dict[str, list[Found]]) -> list[str]:
    """Exits' losses on what their runs held out, as they learnt."""
    lines = ["# Training", "", "The exits' loss on the runs' held-out text, in nats a token.", ""]
    lines += ["| design | after layer | tokens: loss |", "|---|--:|---|"]
    for design, records in runs.items():
        for layer in records[-1]["exits"]:
            seen = ", ".join(f"{one['tokens'] / 1e6:.0f}M: {one['exits'][layer]:.2f}" for one in records)
            lines.append(f"| {design} | {layer} | {seen} |")
    return [*lines, ""] if runs else []


def _readout(found: Found) -> list[str]:
    """What smollm2_readout.py found, five layers a line."""
    layers = [(int(layer), one["agreement"]) for layer, one in found["layers"].items()]
    return [
        "# What each layer knows",
        "",
        f"The part of {found['asked']:,} held-out tokens of replies at which the best linear reading of a layer's state "
        f"(fitted over {found['learnt_from']:,} tokens) chooses what the last layer chooses.",
        "",
        *_columns([(str(layer), f"{agreement:.1%}") for layer, agreement in layers], 5),
        "",
    ]


def _columns(cells: list[tuple[str, str]], rows: int) -> list[str]:
    """Pairs down the columns of a table."""
    groups = [cells[i : i + rows] for i in range(0, len(cells), rows)]
    lines = ["| layer | agrees " * len(groups) + "|", "|--:|--:" * len(groups) + "|"]
    for row in range(rows):
        found = [group[row] if row < len(group) else ("", "") for group in groups]
        lines.append("".join(f"| {layer} | {agrees} " for layer, agrees in found) + "|")
    return lines


def fastest(modes: dict[str, Found], agreement: float = 0.0) -> Found | None:
    """Of the thresholds that were tried, the one with the highest speed among those that agree so often."""
    agreeing = [one for one in modes.values() if one.get("agreement", 1.0) >= agreement]
    return max(agreeing, key=lambda one: one["speedup"], default=None)


def _heading(device: str, place: dict[str, Any]) -> list[str]:
    where, settings = place["environment"], place["settings"]
    seeds = ", ".join(str(seed) for seed in sorted({found["seed"] for found in place["exits"].values()}))
    threads = f"{where['threads']} threads" if device.startswith("cpu") else "captured graphs"
    return [
        f"## {where['device']}, {settings['dtype']}, {threads}",
        "",
        f"torch {where['torch']}, {where['date']}, commit {place['revision']}, seed {seeds}. {settings['prompts']} held-out "
        f"prompts of each kind (chats up to the reply; the first {settings['prompt_tokens']} tokens of documents), at most "
        f"{settings['new_tokens']} new tokens each, greedy, one row.",
        "",
        "Speed is against full decoding of the same row; MB are the adapter's in bfloat16; the loss is the exit's on",
        "held-out text in nats a token, with the last output's in brackets. Draft: speed of passes that end at the exit,",
        "which is the most that leaving could give. Kept: drafts that the full model accepts. Same: texts that are full",
        f"decoding's to the last token. Parallel: the fastest whose tokens the full model would have chosen in {AGREES:.0%}",
        "of all places, with that agreement and the full model's perplexity of the text (full decoding's in brackets).",
        "",
    ]


def _summary(place: dict[str, Any]) -> list[str]:
    lines = [
        "| design | layer | words | drafts | MB | prompts | loss | draft | speculative | at | kept | same | parallel | at "
        "| agreement | perplexity |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for found in place["exits"].values():
        for kind, figures in found["kinds"].items():
            words = f"{found['words']:,}" if found["words"] else "all"
            loss, draft = figures["held_out"], figures["full"]["ms_per_token"] / figures["static"]["ms_per_token"]
            cells = [found["design"], str(found["layer"]), words, str(found["max_stack"])]
            cells += [f"{found['adapter_bytes'] / 1e6:.2f}", kind, f"{loss['loss']:.3f} ({loss['full_loss']:.3f})"]
            cells += [f"{draft:.2f}x", *_speculative_cells(figures), *_parallel_cells(figures)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _speculative_cells(figures: Found) -> list[str]:
    best = fastest(figures.get("speculative", {}))
    if best is None:
        return ["-"] * 4
    return [
        f"**{best['speedup']:.2f}x**",
        f"{best['threshold']:.2f}",
        f"{best['acceptance']:.0%}",
        f"{best['same_texts']:.0%}",
    ]


def _parallel_cells(figures: Found) -> list[str]:
    best = fastest(figures.get("parallel", {}), AGREES)
    if best is None:
        return ["-"] * 4
    judged = f"{best['perplexity']:.2f} ({figures['full']['perplexity']:.2f})"
    return [f"{best['speedup']:.2f}x", f"{best['threshold']:.2f}", f"{best['agreement']:.1%}", judged]


def _details(place: dict[str, Any], kind: str) -> list[str]:
    lines = [
        f"## {place['environment']['device']}: {kind}",
        "",
        "| exit | mode | threshold | ms/token | speed | left early | drafts kept | shallow passes | deep passes | same "
        "| agreement | perplexity |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in place["exits"].items():
        figures = found["kinds"][kind]
        full, static = figures["full"], figures["static"]
        speed = full["ms_per_token"] / static["ms_per_token"]
        tail = f"| {full['agreement']:.1%} | {full['perplexity']:.2f} |"
        lines.append(f"| {name} | full | - | {full['ms_per_token']:.3f} | 1.00 | - | - | - | - | - {tail}")
        lines.append(f"| {name} | up to the exit only | - | {static['ms_per_token']:.3f} | {speed:.2f} | | | | | | | |")
        for mode in ("speculative", "parallel"):
            lines += [_row(name, mode, label, one) for label, one in figures.get(mode, {}).items()]
    return [*lines, ""]


def _row(name: str, mode: str, label: str, figures: Found) -> str:
    cells = [
        name,
        mode,
        f"{figures['threshold']:.2f}{', adaptive' if label == 'adaptive' else ''}",
        f"{figures['ms_per_token']:.3f}",
        f"{figures['speedup']:.2f}",
        f"{figures['exit_rate']:.1%}",
        f"{figures['acceptance']:.1%}" if "acceptance" in figures else "-",
        f"{figures['shallow_passes']:.2f}",
        f"{figures['deep_passes']:.2f}",
        f"{figures['same_texts']:.0%}",
        f"{figures['agreement']:.1%}" if "agreement" in figures else "-",
        f"{figures['perplexity']:.2f}" if "perplexity" in figures else "-",
    ]
    return f"| {' | '.join(cells)} |"


def choose(record: dict[str, Any]) -> Found:
    """The exit and the threshold with the largest geometric mean of the devices' speculative speeds, on chats where there
    are some. Every device must have tried it; an adaptive threshold is another number on each, so it is not one to ship."""
    places = {name: place for name, place in record["runs"].items() if place["settings"]["dtype"] == "float32"}
    if not places:
        raise SystemExit("nothing was measured in float32, in which speculative text is full decoding's")
    common = set.intersection(*(set(place["exits"]) for place in places.values()))
    found: list[Found] = []
    for name in sorted(common):
        entries = {device: place["exits"][name] for device, place in places.items()}
        kind = "chats" if all("chats" in entry["kinds"] for entry in entries.values()) else "documents"
        tried = {device: entry["kinds"].get(kind, {}).get("speculative", {}) for device, entry in entries.items()}
        first = next(iter(entries.values()))
        for label in set.intersection(*(set(modes) for modes in tried.values())) - {"adaptive"}:
            figures = {device: modes[label] for device, modes in tried.items()}
            speed = math.prod(one["speedup"] for one in figures.values()) ** (1 / len(figures))
            parts = {key: first[key] for key in ("run", "corpus", "design", "layer", "words", "max_stack", "adapter_bytes")}
            found.append(parts | {"threshold": float(label), "prompts": kind, "speed": speed, "devices": figures})
    if not found:
        raise SystemExit("no exit was measured with the same threshold on every device; measure the same ones on each")
    return max(found, key=lambda one: (one["speed"], -one["adapter_bytes"]))


def describe_choice(choice: Found, pack: Path) -> str:
    few = f" --exit-vocab {choice['words']} --exit-vocab-from TEXT" if choice["words"] else ""
    lines = [
        f"{entry_name(choice)}, threshold {choice['threshold']:g}: {choice['speed']:.2f}x full decoding on "
        f"{choice['prompts']}, the geometric mean of {len(choice['devices'])} device(s)"
    ]
    for device, one in choice["devices"].items():
        lines.append(
            f"  {device}: {one['speedup']:.2f}x, {one['ms_per_token']:.3f} ms a token, {one['acceptance']:.0%} of drafts "
            f"kept, {one['same_texts']:.0%} of the texts are full decoding's to the last token"
        )
    lines += [
        f"  fathomlm export {choice['run']}/last {pack} --format exits --dtype bfloat16{few}",
        f"  fathomlm chat smollm2-135m --exits {pack} --decode speculative --exit-layer {choice['layer']} "
        f"--threshold {choice['threshold']:g} --max-stack {choice['max_stack']}",
        "The first command writes every exit of the run; --pack writes this one alone, with the words that were measured.",
    ]
    return "\n".join(lines)
