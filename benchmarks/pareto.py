"""Loss against tokens per second: the models of a study in the engine, each at several batch sizes and with its own routing.

    fathomlm study run pareto --corpus CORPUS --keep
    python benchmarks/pareto.py run --out benchmarks/results/pareto_h200.json --work runs/study
    python benchmarks/pareto.py draw benchmarks/results/pareto_h200.json

Losses are those of the ledger, means over seeds. A model is timed as the run of the first seed kept it under --work, in
bfloat16 on a GPU, with memory for every sequence at its deepest; requests have a prompt of one token and about --mean new
ones, greedy. Each batch size is measured --rounds times, all models of one round before the next, behind a round that is not
counted. The speed at a batch size is the median; a model's best is that of its best batch size, so no side is held to
another's. What less depth costs at test time is measured by `fathomlm analyze routing` on the same models.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from engine_throughput import LONGEST, Bench

import fathomlm
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.lab.drawing import LINES, MARKERS, new_figure, plain_axes, save_figure
from fathomlm.lab.study.jobs import Place
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import results_of
from fathomlm.lab.study.results import Row
from fathomlm.lab.study.spec import read_study
from fathomlm.model.hub import FathomForCausalLM

Record = dict[str, Any]


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Variants with a finished run, under the study's last budget that has any."""
    (results,) = results_of([read_study(args.study)], Ledger(args.ledger))
    finished = [row for row in results.rows if row.records]
    if not finished:
        raise SystemExit(f"{args.ledger} has no finished run of {args.study}; run `fathomlm study run {args.study} --keep`")
    return [row for row in finished if row.budget == finished[-1].budget]


def open_kept(row: Row, work: Path, device: torch.device) -> FathomForCausalLM | None:
    path = Place(None, work).directory(row.job.run) / "last"
    if not path.exists():
        print(f"{row.variant.name}: there is no {path}; runs are kept by --keep", flush=True)
        return None
    model = fathomlm.load(path).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    assert isinstance(model, FathomForCausalLM)
    return model.eval()


def engine_of(bench: Bench, model: FathomForCausalLM, batch_size: int, longest: int) -> Engine:
    options = EngineOptions(batch_size=batch_size, max_length=longest)
    memory = ample_memory(model.decoder, options, longest)
    return bench.engine(model, batch_size, memory=memory, max_length=longest)


def run(args: argparse.Namespace) -> None:
    bench = Bench(args)
    record: Record = {
        "environment": bench.record["environment"], "study": args.study, "ledger": str(args.ledger),
        "settings": {"mean": args.mean, "rounds": args.rounds, "requests": "six for each concurrent sequence"},
        "models": {},
    }  # fmt: skip
    models: dict[str, FathomForCausalLM] = {}
    for row in rows_of(args):
        model = open_kept(row, args.work, bench.device)
        if model is not None:
            models[row.variant.name] = model
            record["models"][row.variant.name] = {
                "loss": row.mean(), "seeds": sorted(row.records), "tokens": row.job.tokens,
                "parameters": row.job.shaped.cost.non_embedding_parameters,
                "flops_per_token": row.job.shaped.flops_per_token, "speeds": {},
            }  # fmt: skip
    if not models:
        raise SystemExit(f"{args.work} has no kept model of {args.study}; run `fathomlm study run {args.study} --keep`")
    for batch_size in args.batch_sizes:
        engines = {
            name: engine_of(bench, model, batch_size, min(LONGEST, model.architecture.context))
            for name, model in models.items()
        }
        rounds: dict[str, list[Record]] = {name: [] for name in engines}
        for turn in range(args.rounds + 1):
            for name, engine in engines.items():
                found = bench.throughput(engine, 6 * engine.runner.sizes.max_sequences)
                if turn:
                    rounds[name].append(found)
        for name, found in rounds.items():
            speeds = [one["tokens_per_s"] for one in found]
            told = {"tokens_per_s": round(statistics.median(speeds)), "rounds": speeds}
            told |= {key: found[-1][key] for key in ("inter_token_ms_p50", "mean_depth", "slots") if key in found[-1]}
            record["models"][name]["speeds"][str(batch_size)] = told
            print(f"{name}, batch size {batch_size}: {told}", flush=True)
        args.out.write_text(json.dumps(with_best(record), indent=1) + "\n", encoding="utf-8")
        engines.clear()
        bench.clear()
    draw(args.out)


def with_best(record: Record) -> Record:
    """With each model's best batch size, and whether another has a lower loss and is as fast."""
    for model in record["models"].values():
        best = max(model["speeds"], key=lambda size: model["speeds"][size]["tokens_per_s"])
        model["best"] = {"batch_size": int(best), "tokens_per_s": model["speeds"][best]["tokens_per_s"]}
    for model in record["models"].values():
        model["on_the_frontier"] = not any(
            other["loss"] < model["loss"] and other["best"]["tokens_per_s"] >= model["best"]["tokens_per_s"]
            for other in record["models"].values()
        )
    return record


def draw(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    figure = new_figure(12, 4.8)
    left, right = figure.subplots(1, 2)
    for number, (name, model) in enumerate(record["models"].items()):
        style = {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)]}
        speed = model["best"]["tokens_per_s"]
        left.plot([speed / 1e3], [model["loss"]], linestyle="none", markersize=8, **style)
        left.annotate(
            f"{name}: {model['loss']:.3f}, {speed:,}/s", (speed / 1e3, model["loss"]), (0, 7),
            textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
        sizes = sorted(map(int, model["speeds"]))
        speeds = [model["speeds"][str(size)]["tokens_per_s"] / 1e3 for size in sizes]
        right.plot(sizes, speeds, linewidth=1.2, markersize=4, label=name, **style)
    left.margins(0.2)
    right.set_xscale("log", base=2)
    from matplotlib.ticker import ScalarFormatter

    right.xaxis.set_major_formatter(ScalarFormatter())
    right.legend(fontsize=8)
    where = record["environment"]
    plain_axes(
        left, "Loss against speed, each at its best batch size", "thousand tokens/s", "validation loss (nats per token)"
    )
    plain_axes(right, "Speed by batch size", "tokens of a forward pass", "thousand tokens/s")
    title = f"Models of the study {record['study']} in the engine, {where['device']}, {where['date']}"
    save_figure(figure, title, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    runs = verbs.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--study", default="pareto")
    runs.add_argument("--ledger", type=Path, default=Path("benchmarks/results/study"))
    runs.add_argument("--work", type=Path, default=Path("runs/study"))
    runs.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 128, 256, 512])
    runs.add_argument("--rounds", type=int, default=3)
    runs.add_argument("--mean", type=float, default=256.0, help="new tokens of a request")
    runs.set_defaults(tiny=True, requests=0, profile=0)
    verbs.add_parser("draw").add_argument("out", type=Path)
    args = parser.parse_args()
    if args.verb == "draw":
        draw(args.out)
    else:
        run(args)


if __name__ == "__main__":
    main()
