"""Plain, recursive and routed models of one small shape after equal tokens (thesis 4.4.1; tables on routers and KV).

    python benchmarks/mor_small.py run --corpus CORPUS --work runs/mor-small --out mor_small.json
    python benchmarks/mor_small.py draw mor_small.json benchmarks/results/mor_small_h200

All see the same tokens in the same order with the same settings; recursive and routed ones have a part of the plain one's
weights. Losses are on held-out documents: by top-k, as in training, and causal, as at inference. `run --only NAME ...`
adds to a record that is there; `draw` writes the table and the picture from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from several_runs import add_arguments, command, open_record, settings, train_one

SHAPE = {"layers": 14, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 4, "context": 1024}
"""12 layers between the first and the last, which both two and three recursions divide."""


def variants() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"vanilla": {}}
    for recursions in (2, 3):
        looped = {"sharing": "middle-cycle", "recursions": recursions}
        found[f"recursive, N_r={recursions}"] = looped
        found[f"MoR expert, N_r={recursions}"] = looped | {"router": {"kind": "expert"}}
        found[f"MoR token, N_r={recursions}"] = looped | {"router": {"kind": "token"}}
    return found


FINDINGS = {
    "vanilla": "2.7824 (360M shape, 20B tokens, as all below)",
    "recursive, N_r=2": "2.8079: above vanilla, with half the weights",
    "recursive, N_r=3": "2.8466",
    "MoR expert, N_r=2": "2.7749: the lowest",
    "MoR expert, N_r=3": "2.8246: below the recursive one",
    "MoR token, N_r=2": "not reported",
    "MoR token, N_r=3": "2.9163 with 30B tokens: the highest",
}
"""Validation loss in the thesis' table of main results."""


def run(args: argparse.Namespace) -> None:
    from fathomlm.depth.cost import count
    from fathomlm.train.student import read_student

    shared = settings(args, SHAPE["context"], warmup=0.05)
    record, new = open_record(args.out, shared)
    if new:
        record["shape"] = SHAPE
    for name in args.only or variants():
        found = train_one(args, shared, name, {"architecture": SHAPE | {"vocab": args.vocab}, **variants()[name]})
        parts = read_student(found.recipe)
        cost = count(parts.architecture, parts.plan, context=SHAPE["context"])
        record["runs"][name] = {
            "model": variants()[name],
            "non_embedding_parameters": cost.non_embedding_parameters,
            "forward_flops_per_token": cost.forward_flops_per_token,
            "training": [{k: r[k] for k in ("step", "tokens", "loss", "tokens_per_s")} for r in found.training],
            "validation": [{"step": r["step"], "tokens": r["tokens"], **r["parts"]} for r in found.validations],
            "final": found.validations[-1]["parts"],
            "seconds": found.seconds,
        }
        args.out.write_text(json.dumps(record) + "\n")
        shown = {key: round(value, 4) for key, value in found.validations[-1]["parts"].items()}
        print(f"{name:20} {found.seconds} s  {shown}", flush=True)


def table(record: dict[str, Any]) -> str:
    where, settings = record["environment"], record["settings"]
    tokens = next(iter(record["runs"].values()))["training"][-1]["tokens"]
    base = record["runs"]["vanilla"]["forward_flops_per_token"]
    rows, context = settings["batch"]["sequences"], settings["data"]["context"]
    lines = [
        "# Plain, recursive and routed models after equal tokens",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. {SHAPE['layers']} layers of width {SHAPE['hidden']},",
        f"{tokens / 1e6:.0f}M tokens each of one corpus in one order, {rows} rows of {context} a step, AdamW "
        f"{settings['optimizer']['lr']:g}, cosine, {settings['precision']}, one seed.",
        "Loss on held-out documents, nats a token: by top-k, as in training, and causal, as at inference. Sampling accuracy",
        "and dead tokens are expert-choice's, MaxVio (max violation) and entropy token-choice's. FLOPs are forward, against",
        "vanilla, as capacities say; token-choice in training computes every recursion for every token.",
        "",
        "| model | weights | FLOPs | loss | causal | sampling accuracy | dead | MaxVio | entropy | mean depth | tokens/s "
        "| thesis |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, found in record["runs"].items():
        last = found["final"]
        cells = [
            f"{found['non_embedding_parameters'] / 1e6:.1f}M",
            f"{found['forward_flops_per_token'] / base:.2f}",
            f"{last['next_token']:.4f}",
            *(_cell(last, key) for key in METRICS),
            f"{found['training'][-1]['tokens_per_s']:,.0f}",
            FINDINGS[name],
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


METRICS = ("causal", "sampling_accuracy", "dead_tokens", "max_violation", "entropy", "mean_depth")


def _cell(values: dict[str, float], key: str) -> str:
    return f"{values[key]:.4f}" if key in values else "-"


def picture(record: dict[str, Any], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    kinds = {"vanilla": "black", "recursive": "tab:blue", "MoR expert": "tab:orange", "MoR token": "tab:green"}
    for name, found in record["runs"].items():
        colour = next(colour for kind, colour in kinds.items() if name.startswith(kind))
        style = "--" if "=3" in name else "-"
        x = [r["tokens"] / 1e6 for r in found["validation"]]
        y = [r.get("causal", r["next_token"]) for r in found["validation"]]
        left.plot(x, y, style, color=colour, marker="o", markersize=3, label=f"{name}: {y[-1]:.3f}")
        for key, what, marker in (("sampling_accuracy", "sampling accuracy", "o"), ("max_violation", "max violation", "s")):
            if key in found["final"]:
                values = [r[key] for r in found["validation"]]
                label = f"{name}, {what}: {values[-1]:.3f}"
                right.plot(x, values, style, color=colour, marker=marker, markersize=3, label=label)
    finals = [r["final"].get("causal", r["final"]["next_token"]) for r in record["runs"].values()]
    left.set_ylim(min(finals) - 0.1, min(finals) + 1.5)
    left.set_title("Validation loss (routed models: causal)")
    left.set_ylabel("loss (nats a token)")
    right.set_title("Routers on validation rows")
    right.set_ylabel("part of the decisions; load above an even share")
    for axes in (left, right):
        axes.set_xlabel("tokens seen (millions)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    shape = record["shape"]
    figure.suptitle(f"{shape['layers']} layers of width {shape['hidden']}, equal tokens ({record['environment']['device']})")
    figure.savefig(out, dpi=130)


def add_run(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, variants(), work="runs/mor-small", tokens="47M", rows=64, micro=64, lr=1e-3, every=100)
    parser.add_argument("--vocab", type=int, default=49152)


if __name__ == "__main__":
    command(__doc__ or "", add_run, run, table, picture)
