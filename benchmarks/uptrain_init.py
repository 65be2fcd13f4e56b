"""What a looped model starts from, after equal uptraining (thesis 3.4.4, 3.4.5; figures on initialisation and relaxation).

    python benchmarks/uptrain_init.py run --source smollm2-135m --corpus CORPUS --work runs/uptrain-init --out uptrain.json
    python benchmarks/uptrain_init.py draw uptrain.json benchmarks/results/uptrain_init_h200

SmolLM2-135M becomes 15 layers looped twice, started stepwise, as an average, or at random; and as an average with rank-64
LoRA at every step, started by SVD towards the original weights or at zero. All five see the same tokens in the same order
with the same settings; only the start differs. `run --only NAME ...` adds to a record that is there; `draw` writes the
table and the picture from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from several_runs import add_arguments, command, open_record, settings, train_one

VARIANTS: dict[str, dict[str, Any]] = {
    "stepwise": {"init": "stepwise"},
    "average": {"init": "average"},
    "random": {"init": "random"},
    "average + LoRA 64, SVD": {"init": "average", "relax": "lora", "rank": 64, "relax_init": "svd"},
    "average + LoRA 64, zero": {"init": "average", "relax": "lora", "rank": 64, "relax_init": "zero"},
}
FINDINGS = {
    "stepwise": "best start of a tied model",
    "average": "clearly below stepwise, above random; notably poor for Gemma",
    "random": "far below both: pretrained weights help in any manner",
    "average + LoRA 64, SVD": "average is the best tied start under LoRA, even above stepwise without it",
    "average + LoRA 64, zero": "SVD beats zero (by up to 6.5 points of accuracy at rank 512)",
}


def run(args: argparse.Namespace) -> None:
    shared = settings(args, 2048, warmup=0.1)
    shared["evaluate"]["first"] = True
    record, new = open_record(args.out, shared)
    if new:
        record["original"] = original_loss(args, shared)
    print("original", record["original"], flush=True)
    for name in args.only or VARIANTS:
        model = {"source": args.source, "sharing": "cycle", "recursions": 2, **VARIANTS[name]}
        found = train_one(args, shared, name, model)
        keep = ("step", "tokens", "loss", "lr", "tokens_per_s", "mfu", "mfu_sustained", "memory_gb")
        record["runs"][name] = {
            "model": VARIANTS[name],
            "parameters": parameters(found.recipe.directory),
            "training": [{k: r[k] for k in keep} for r in found.training],
            "validation": [{k: r[k] for k in ("step", "tokens", "loss")} for r in found.validations],
            "final": found.validation,
            "seconds": found.seconds,
        }
        args.out.write_text(json.dumps(record) + "\n")
        rate = found.training[-1]["tokens_per_s"]
        print(f"{name:26} {found.validation:.4f}  {rate:,.0f} tokens/s  {found.seconds} s", flush=True)


def parameters(directory: str) -> int:
    from safetensors import safe_open

    with safe_open(Path(directory) / "last" / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def original_loss(args: argparse.Namespace, shared: dict[str, Any]) -> float:
    """The untied model's validation loss, untouched: what all starts are measured against."""
    import torch

    from fathomlm.train.distributed import join
    from fathomlm.train.loop import Stepper
    from fathomlm.train.objective import Objective
    from fathomlm.train.optim import build_optimizer
    from fathomlm.train.reading import build_recipe
    from fathomlm.train.schedule import LearningRate
    from fathomlm.train.setup import build_student, open_data

    recipe = build_recipe({**shared, "model": {"source": args.source}})
    with join(args.device) as world, torch.no_grad():
        data = open_data(recipe, world)
        assert data.validation is not None
        objective = Objective(build_student(recipe, data.corpus).decoder.to(world.device), recipe.loss)
        optimizer = build_optimizer(objective, recipe.optimizer)
        stepper = Stepper(recipe, objective, objective, optimizer, LearningRate.of(recipe.schedule, 100), world)
        return stepper.validate(data.validation, args.validation_rows)[0]["next_token"]


def table(record: dict[str, Any]) -> str:
    where, settings = record["environment"], record["settings"]
    tokens = next(iter(record["runs"].values()))["training"][-1]["tokens"]
    device, rows, context = where["device"], settings["batch"]["sequences"], settings["data"]["context"]
    lines = [
        "# What a looped SmolLM2-135M starts from",
        "",
        f"{device}, torch {where['torch']}, {where['date']}. 15 layers looped twice, {tokens / 1e6:.1f}M tokens each of one",
        f"corpus in one order, {rows} rows of {context} a step, AdamW {settings['optimizer']['lr']:g}, cosine, "
        f"{settings['precision']}, one seed.",
        "Validation loss on held-out documents, in nats a token.",
        f"The untied model before any training: {record['original']:.4f}.",
        "",
        "| start | parameters | before training | after | above the original | what the thesis found |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, found in record["runs"].items():
        size, first, last = found["parameters"] / 1e6, found["validation"][0]["loss"], found["final"]
        above = last - record["original"]
        lines.append(f"| {name} | {size:.1f}M | {first:.3f} | {last:.4f} | {above:+.4f} | {FINDINGS[name]} |")
    return "\n".join(lines) + "\n"


def picture(record: dict[str, Any], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, found in record["runs"].items():
        style = "--" if "LoRA" in name else "-"
        for axes, kind in ((left, "training"), (right, "validation")):
            x = [r["tokens"] / 1e6 for r in found[kind]]
            y = [r["loss"] for r in found[kind]]
            label = f"{name}: {found['final']:.3f}" if kind == "validation" else name
            axes.plot(x, y, style, label=label, marker="o" if kind == "validation" else None, markersize=3)
    untied = record["original"]
    right.axhline(untied, color="black", linewidth=1, linestyle=":", label=f"untied original: {untied:.3f}")
    for axes, kind in ((left, "Training"), (right, "Validation")):
        axes.set_title(f"{kind} loss")
        axes.set_xlabel("tokens seen (millions)")
        axes.set_ylabel("loss (nats a token)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title="start: final loss" if kind == "Validation" else "start", title_fontsize=8)
    for axes in (left, right):
        axes.set_ylim(record["original"] - 0.2, 8)
    figure.suptitle(
        f"SmolLM2-135M, 15 layers looped twice: starts after equal uptraining ({record['environment']['device']})"
    )
    figure.savefig(out, dpi=130)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="smollm2-135m")
    add_arguments(parser, VARIANTS, work="runs/uptrain-init", tokens="20M", rows=32, micro=32, lr=5e-4, every=20)


if __name__ == "__main__":
    command(__doc__ or "", add_run, run, table, picture)
