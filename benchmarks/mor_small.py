"""Plain, recursive and routed models of one small shape after equal tokens (thesis 4.4.1; tables on routers and KV).

    python benchmarks/mor_small.py run --corpus CORPUS --work runs/mor-small --out mor_small.json
    python benchmarks/mor_small.py draw mor_small.json benchmarks/results/mor_small_h200

All see the same tokens in the same order with the same settings; recursive and routed ones have a part of the plain one's
weights. Losses are on held-out documents: by top-k, as in training, and causal, as at inference. `run --only NAME ...`
adds to a record that is there; `draw` writes the table and the picture from it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

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
    import torch
    from environment import environment

    from fathomlm.depth.cost import count
    from fathomlm.train.parts import read_parts
    from fathomlm.train.reading import build_recipe
    from fathomlm.train.report import read_records
    from fathomlm.train.run import train

    shared: dict[str, Any] = {
        "data": {"path": args.corpus, "context": SHAPE["context"]},
        "budget": {"tokens": args.tokens},
        "batch": {"sequences": args.rows, "micro": args.micro},
        "optimizer": {"lr": args.lr, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup": 0.05},
        "precision": args.precision,
        "compile": args.compile,
        "device": args.device,
        "evaluate": {"every": args.every, "rows": args.validation_rows},
        "checkpoint": {"every": 10**6, "keep": 1, "best": False},
        "log": {"every": 10, "tensorboard": False},
    }
    record: dict[str, Any] = {"environment": environment(), "shape": SHAPE, "settings": shared, "runs": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
        if record["settings"] != shared:
            raise SystemExit(f"{args.out} was measured with other settings; name another file")
    for name in args.only or variants():
        begin = time.perf_counter()
        slug = "".join(c if c.isalnum() else "-" for c in name.lower())
        model = {"architecture": SHAPE | {"vocab": args.vocab}, **variants()[name]}
        recipe = build_recipe({**shared, "name": slug, "out": str(Path(args.work) / slug), "model": model})
        summary = train(recipe)
        curve = read_records(Path(recipe.directory) / "metrics.jsonl")
        parts = read_parts(recipe)
        cost = count(parts.architecture, parts.plan, context=SHAPE["context"])
        validations = [r for r in curve if r["kind"] == "validation"]
        record["runs"][name] = {
            "model": variants()[name],
            "non_embedding_parameters": cost.non_embedding_parameters,
            "forward_flops_per_token": cost.forward_flops_per_token,
            "training": [
                {k: r[k] for k in ("step", "tokens", "loss", "tokens_per_s")} for r in curve if r["kind"] == "train"
            ],
            "validation": [{"step": r["step"], "tokens": r["tokens"], **r["parts"]} for r in validations],
            "final": validations[-1]["parts"],
            "loss": summary.validation,
            "seconds": round(time.perf_counter() - begin, 1),
        }
        args.out.write_text(json.dumps(record) + "\n")
        last = record["runs"][name]["final"]
        shown = {key: round(value, 4) for key, value in last.items()}
        print(f"{name:20} {record['runs'][name]['seconds']} s  {shown}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def draw(args: argparse.Namespace) -> None:
    record = json.loads(args.record.read_text())
    record["settings"]["data"].pop("path", None)  # where it lay on that machine is of no interest
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(table(record))
    picture(record, Path(f"{args.stem}.png"))
    print(table(record))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    go = verbs.add_parser("run")
    go.add_argument("--corpus", required=True)
    go.add_argument("--work", default="runs/mor-small")
    go.add_argument("--out", type=Path, default=Path("mor_small.json"))
    go.add_argument("--tokens", default="47M")
    go.add_argument("--rows", type=int, default=64)
    go.add_argument("--micro", type=int, default=64)
    go.add_argument("--lr", type=float, default=1e-3)
    go.add_argument("--vocab", type=int, default=49152)
    go.add_argument("--every", type=int, default=100)
    go.add_argument("--validation-rows", type=int, default=128)
    go.add_argument("--precision", default="bf16")
    go.add_argument("--device", default="auto")
    go.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    go.add_argument("--only", nargs="*", choices=list(variants()))
    go.set_defaults(run=run)
    show = verbs.add_parser("draw")
    show.add_argument("record", type=Path)
    show.add_argument("stem")
    show.set_defaults(run=draw)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
