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
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str], **defaults: Any) -> None:
    """How all runs are made; `defaults` are the comparison's own."""
    add = parser.add_argument
    add("--corpus", required=True, help="a directory made by `fathomlm data prepare`")
    add("--work", default=defaults["work"], help="where the runs go")
    add(
        "--out",
        type=Path,
        default=Path(f"{Path(defaults['work']).name}.json"),
        help="the record, added to where it is there",
    )
    add("--tokens", default=defaults["tokens"])
    add("--rows", type=int, default=defaults["rows"])
    add("--micro", type=int, default=defaults["micro"])
    add("--lr", type=float, default=defaults["lr"])
    add("--every", type=int, default=defaults["every"])
    add("--validation-rows", type=int, default=128)
    add("--precision", default="bf16")
    add("--device", default="auto")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--only", nargs="*", choices=list(names))


def settings(args: argparse.Namespace, context: int, warmup: float) -> dict[str, Any]:
    """The part of a recipe that is the same for all."""
    return {
        "data": {"path": args.corpus, "context": context},
        "budget": {"tokens": args.tokens},
        "batch": {"sequences": args.rows, "micro": args.micro},
        "optimizer": {"lr": args.lr, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup": warmup},
        "precision": args.precision,
        "compile": args.compile,
        "device": args.device,
        "evaluate": {"every": args.every, "rows": args.validation_rows},
        "checkpoint": {"every": 10**6, "keep": 1, "best": False},
        "log": {"every": 5, "tensorboard": False},
    }


def open_record(out: Path, shared: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record to add to, and whether it is new."""
    from fathomlm.lab.common import environment

    if not out.exists():
        return {"environment": environment(), "settings": shared, "runs": {}}, True
    record: dict[str, Any] = json.loads(out.read_text())
    if record["settings"] != shared:
        raise SystemExit(f"{out} was measured with other settings; name another file")
    return record, False


@dataclass(frozen=True)
class Trained:
    """One run, finished."""

    recipe: Any
    validation: float | None
    training: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    seconds: float


def train_one(args: argparse.Namespace, shared: dict[str, Any], name: str, model: dict[str, Any]) -> Trained:
    import torch

    from fathomlm.train.reading import build_recipe
    from fathomlm.train.report import read_records
    from fathomlm.train.run import train

    begin = time.perf_counter()
    slug = "".join(c if c.isalnum() else "-" for c in name.lower())
    recipe = build_recipe({**shared, "name": slug, "out": str(Path(args.work) / slug), "model": model})
    summary = train(recipe)
    curve = read_records(Path(recipe.directory) / "metrics.jsonl")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Trained(
        recipe,
        summary.validation,
        [r for r in curve if r["kind"] == "train"],
        [r for r in curve if r["kind"] == "validation"],
        round(time.perf_counter() - begin, 1),
    )


def publish(
    args: argparse.Namespace, table: Callable[[dict[str, Any]], str], picture: Callable[[dict[str, Any], Path], None]
) -> None:
    """A record as JSON, table and picture beside each other."""
    record = json.loads(args.record.read_text())
    record["settings"]["data"].pop("path", None)  # where it lay on that machine is of no interest
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(table(record))
    picture(record, Path(f"{args.stem}.png"))
    print(table(record))


def command(
    description: str,
    add_run: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], None],
    table: Callable[[dict[str, Any]], str],
    picture: Callable[[dict[str, Any], Path], None],
) -> None:
    """A comparison's two verbs: `run` trains and records, `draw` publishes a record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    go = verbs.add_parser("run")
    add_run(go)
    go.set_defaults(run=run)
    show = verbs.add_parser("draw")
    show.add_argument("record", type=Path)
    show.add_argument("stem")
    show.set_defaults(run=lambda args: publish(args, table, picture))
    args = parser.parse_args()
    args.run(args)


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
