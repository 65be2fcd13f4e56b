"""What a compressed SmolLM2-135M costs and keeps: bytes, FLOPs, speed in the engine, loss and tasks, in one table.

    fathomlm study run uptrain --corpus CORPUS --tasks TASKS --keep
    fathomlm study run uptrain-exits --corpus CORPUS --tasks TASKS --keep
    python benchmarks/compress_smollm2.py run --out benchmarks/results/compress_smollm2_h200.json --work runs/study
    python benchmarks/compress_smollm2.py untrained benchmarks/results/compress_smollm2_h200.json --tasks TASKS
    python benchmarks/compress_smollm2.py table benchmarks/results/compress_smollm2_h200.json

The shipped record has the losses of `--studies uptrain uptrain-exits uptrain-long compress compress-vocab`. With
`--rounds 0` nothing is timed: losses are the ledger's, and times those that the record has already, with the environment in
which they were measured.

Losses and tasks are those of the studies' ledger, means over seeds, against the original that was uptrained on as many
tokens, of several rates the best. Where none was, they are against the original of lowest loss, whatever its tokens
(`equal_tokens`), and the gap is marked: "or more" where the original would have learnt from more tokens, too, "or less"
where it had more. `in_study` is the comparison with the original of the same study and budget, where there is one: the same
text, order, schedule and vocabulary. `untrained` scores
the original as it is, on the same tasks. It is SmolLM2-135M-Instruct in four bits (Q4_1), which all these models start
from. Bytes are parameters in one number format, LoRA and embeddings included. A model with fewer tokens needs more of them
for a text; its losses are given per token of the original. Of each kind of model (dropped, narrower, looped, looped + LoRA,
looped + exits) the one of lowest loss is timed, and `best`, in bfloat16, at one row and at 64, in turns, by rounds: a kept
checkpoint where there is one under --work, and random weights of the same shape elsewhere, since time does not depend on
them. Where tokens exit does, so a model with exits is timed only if it was kept; its tokens leave above --threshold, with
exact fill.

`best` is the model of lowest loss within --budget of the original's bytes, without exits, which learn from further tokens;
`curve` has every model that was trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from engine_throughput import LONGEST, requests

import fathomlm
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.presets import preset
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.common import environment
from fathomlm.lab.study.jobs import Place, shape_of, start_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import results_of
from fathomlm.lab.study.results import Results, Row
from fathomlm.lab.study.scores import counted, read_wanted, score
from fathomlm.lab.study.spec import read_study
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.recipe import Recipe

Record = dict[str, Any]
SOURCE = "smollm2-135m"
"""What all of them start from."""
KINDS = ("original", "dropped", "narrower", "fewer tokens", "looped", "looped + LoRA", "looped + exits")
HARM = 0.02
"""Nats by which exits may raise the last output's loss above the lowest, to be chosen by their own."""
TIMES = {32_768: 1.0137}
"""Tokens of the validation text for each of the original's, by vocabulary. Rows are whole: the 130 that stand for the
original's 128 have the text of 128.2, and their ratio would add 0.005 nats to a loss of 3."""


def kind_of(row: Row) -> str:
    """By the model's shape, so that a study may call its variants what it likes."""
    parts = row.job.shaped.parts
    if parts.plan.exits:
        return "looped + exits"
    if parts.relaxation is not None:
        return "looped + LoRA"
    if parts.plan.recursions > 1:
        return "looped"
    shape, base = parts.architecture, preset(SOURCE).architecture
    if shape.vocab < base.vocab:
        whole = (shape.layers, shape.intermediate) == (base.layers, base.intermediate)
        return "original, fewer tokens" if whole else "fewer tokens"
    if shape.intermediate < base.intermediate:
        return "narrower"
    return "dropped" if shape.layers < base.layers else "original"


def known(row: Row, results: Results) -> Record:
    """What the ledger says of a model."""
    shaped, plan = row.job.shaped, row.job.shaped.parts.plan
    records = list(row.records.values())
    found: Record = {
        "study": results.study.name, "variant": row.variant.name, "budget": row.budget.name, "kind": kind_of(row),
        "seeds": sorted(row.records), "layout": f"{shaped.cost.layout} x {plan.recursions}",
        "tokens": row.job.tokens + tokens_before(row.job.shaped.recipe),
        "parameters": records[0]["parameters"] + records[0]["embedding_parameters"],
        "flops_per_token": shaped.cost.forward_flops_per_token,
        "vocab": shaped.parts.architecture.vocab,
        "text_tokens": {
            task: metrics["tokens"] for task, metrics in records[0].get("scores", {}).items() if "nats_per_token" in metrics
        },
        "loss": row.mean(),
        "scores": {task: value for task in results.study.scores if (value := row.mean(task)) is not None},
    }  # fmt: skip
    for index in plan.exits:
        exit_ = f"exit_{index + 1}"
        scores = {task: value for task in results.study.scores if (value := row.mean(f"{exit_}.{task}")) is not None}
        found[exit_] = {"loss": row.mean(exit_), "scores": scores}
    return found


def tokens_before(recipe: Recipe) -> int:
    """Of the run that a run starts from, where it continues one."""
    start = start_of(recipe)
    return 0 if start is None else shape_of(start, Place(None, Path())).length.tokens


def original_of(found: Record, models: Sequence[Record]) -> tuple[Record, bool]:
    """The original that was uptrained on as many tokens but for a batch's, at its best rate; where there is none, the one of
    lowest loss. And whether its tokens are as many."""
    originals = [model for model in models if model["kind"] == "original"]
    alike = [model for model in originals if abs(model["tokens"] - found["tokens"]) <= 0.01 * found["tokens"]]
    return min(alike or originals, key=lambda model: model["loss"]), bool(alike)


def beside_original(found: Record, models: Sequence[Record]) -> Record:
    """The same compared with its original, and which one that is."""
    original, alike = original_of(found, models)
    marks = {"original": "/".join(_run_of(original)), "equal_tokens": alike, "original_tokens": original["tokens"]}
    return compare(found, original) | marks | in_study(found, models)


def in_study(found: Record, models: Sequence[Record]) -> Record:
    """Against the original of the same study and budget, whose vocabulary, text and schedule are this model's. The gap, too,
    is per token of the whole vocabulary."""
    own = [
        model
        for model in models
        if model["kind"].startswith("original") and all(model[name] == found[name] for name in ("study", "budget", "vocab"))
    ]
    if not own or found in own:
        return {}
    original = min(own, key=lambda model: model["loss"])
    kept = compare(found, original)
    gap = round(kept["loss_gap"] * TIMES.get(found["vocab"], 1.0), 4)
    shares = {name: kept[name] for name in ("lambada_share", "hellaswag_share") if name in kept}
    return {"in_study": {"original": "/".join(_run_of(original)), "loss_gap": gap} | shares}


def compare(found: Record, original: Record) -> Record:
    """The same with what it keeps of the original. The loss of a model with other tokens becomes that of a token of the
    original: both were validated on the same text."""
    if found["vocab"] != original["vocab"]:
        texts, whole = found["text_tokens"], original["text_tokens"]
        scores = {
            task: value * texts[task] / whole[task] if task in texts else value for task, value in found["scores"].items()
        }
        found = found | {"own_loss": found["loss"], "loss": found["loss"] * TIMES[found["vocab"]], "scores": scores}
    shares = {
        f"{task.split('_')[0]}_share": round(value / original["scores"][task], 4)
        for task, value in found["scores"].items()
        if original["scores"].get(task) and not task.startswith("wikitext")
    }
    return found | shares | {
        "bytes_share": round(found["parameters"] / original["parameters"], 4),
        "flops_share": round(found["flops_per_token"] / original["flops_per_token"], 4),
        "loss_gap": round(found["loss"] - original["loss"], 4),
    }  # fmt: skip


def chosen(models: Sequence[Record], best: Record, budget: float) -> dict[str, Record]:
    """The `best` within the budget, and of each kind the lowest loss; of exits the lowest loss at the exit among those that
    leave the last output alone."""
    found: dict[str, Record] = {}
    for kind in KINDS:
        own = [model for model in models if model["kind"] == kind]
        if kind == "looped + exits" and own:
            least = min(model["loss"] for model in own)
            own = [model for model in own if model["loss"] <= least + HARM]
            found[kind] = min(own, key=lambda model: next(v["loss"] for k, v in model.items() if k.startswith("exit_")))
        elif own:
            found[kind] = min(own, key=lambda model: model["loss"])
    if all(model is not best for model in found.values()):
        found[f"best within {budget:g} of the bytes"] = best
    return found


class Timed:
    """One model with its two engines."""

    def __init__(self, model: FathomForCausalLM, args: argparse.Namespace) -> None:
        self.device = model.decoder.embed.weight.device
        self.args, self.rounds = args, {"one": [], "many": []}
        self.exits: list[tuple[int, int]] = []
        a, dtype = model.architecture, model.decoder.embed.weight.dtype
        token = model.plan.unrolled_layers * a.kv_bytes(dtype.itemsize)
        longest, exits = min(LONGEST, a.context), tuple(index + 1 for index in model.plan.exits)
        usual: Record = {
            "max_length": longest, "prefix_caching": False, "penalties": False, "max_logprobs": 0, "max_queue": 10**5
        }  # fmt: skip
        self.engines = {}
        for name, rows in (("one", 1), ("many", args.rows)):
            leaving = {"exit_layers": exits, "threshold": args.threshold, "max_stack": min(16, rows)}
            exiting = Exiting(mode="parallel", **leaving) if exits else None
            memory = int(2.2 * rows * longest * token)
            engine = Engine(model, exiting=exiting, batch_size=rows, memory=memory, **usual)
            self.engines[name] = engine
            engine.run(requests(engine.runner.sizes.max_sequences, 12, 2, a.vocab, seed=1))
        finish(self.device)

    def turn(self) -> None:
        vocab = self.engines["one"].model.architecture.vocab
        alone = [Request(id=7, prompt=(1,), sampling=Sampling(max_new_tokens=self.args.new, ignore_eos=True))]
        work = {"one": alone, "many": requests(self.args.waves * self.args.rows, self.args.new, self.args.new / 4, vocab)}
        for name, engine in self.engines.items():
            before, left, begun = engine.totals.tokens, engine.totals.exited, time.perf_counter()
            engine.run(work[name])
            finish(self.device)
            tokens = engine.totals.tokens - before
            self.rounds[name].append(tokens / (time.perf_counter() - begun))
            self.exits.append((engine.totals.exited - left, tokens))

    def record(self) -> Record:
        return {
            "tokens_per_s_one_row": round(statistics.median(self.rounds["one"]), 1),
            f"tokens_per_s_{self.args.rows}_rows": round(statistics.median(self.rounds["many"])),
            "exit_rate": round(sum(left for left, _ in self.exits) / sum(tokens for _, tokens in self.exits), 4),
        }


def open_model(found: Record, row: Row, args: argparse.Namespace) -> tuple[FathomForCausalLM, str] | None:
    """A kept checkpoint, or random weights; None where time depends on weights that are not there."""
    parts, place = row.job.shaped.parts, Place(None, args.work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for seed in found["seeds"]:
        path = place.directory(replace(row.job.run, seed=seed)) / "last"
        if path.exists():
            model = fathomlm.load(path, dtype, str(device))
            assert isinstance(model, FathomForCausalLM)
            return model, f"checkpoint, seed {seed}"
    if parts.plan.exits:
        return None
    return random_model(parts.architecture, parts.plan, parts.relaxation, dtype=dtype, device=device), "random weights"


def best_of(models: Sequence[Record], budget: float) -> Record:
    """The lowest loss within the budget; where nothing is within it, the smallest model, which says so by its bytes."""
    smaller = [model for model in models if model["kind"] not in ("original", "looped + exits")]
    within = [model for model in smaller if model["bytes_share"] <= budget]
    if not within:
        return min(smaller, key=lambda model: (model["bytes_share"], model["loss"]))
    return min(within, key=lambda model: model["loss"])


def pareto(models: Sequence[Record], cost: str) -> list[str]:
    """Models that no other beats in both loss and cost, the cheapest first."""
    equal = [model for model in models if model["kind"] != "looped + exits"]  # exits learn from further tokens
    ranked = sorted(equal, key=lambda model: (model[cost], model["loss"]))
    found: list[Record] = []
    for model in ranked:
        if not found or model["loss"] < found[-1]["loss"]:
            found.append(model)
    return [model["variant"] for model in found]


def run(args: argparse.Namespace) -> None:
    results = results_of([read_study(name) for name in args.studies], Ledger(args.ledger))
    rows = {
        f"{each.study.name}/{row.variant.name}/{row.budget.name}": (row, each)
        for each in results
        for row in each.rows
        if row.records
    }
    models = [known(row, each) for row, each in rows.values()]
    if len(models) < 2 or all(model["kind"] != "original" for model in models):
        raise SystemExit(f"{args.ledger} has no finished original of {', '.join(args.studies)}, or nothing beside it")
    models = [beside_original(model, models) for model in models]
    best = best_of(models, args.budget)
    record: Record = {
        "environment": environment(),
        "settings": {"rows": args.rows, "new": args.new, "waves": args.waves, "threshold": args.threshold},
        "budget": args.budget,
        "best": best,
        "pareto": {cost: pareto(models, cost) for cost in ("bytes_share", "flops_share")},
        "models": chosen(models, best, args.budget),
        "curve": models,
    }
    if not args.rounds and args.out.exists():
        keep_times(record, json.loads(args.out.read_text()))
    save(record, args.out)
    timed: dict[str, Timed] = {}
    for kind, found in record["models"].items() if args.rounds else ():
        opened = open_model(found, rows[f"{found['study']}/{found['variant']}/{found['budget']}"][0], args)
        if opened is None:
            print(f"{kind}: {found['variant']} was not kept under {args.work}, so it is not timed", flush=True)
            continue
        model, found["timed"] = opened
        begun = time.perf_counter()
        timed[kind] = Timed(model, args)
        print(f"{kind}: {found['variant']}, {found['timed']}, set up in {time.perf_counter() - begun:.1f} s", flush=True)
    for _ in range(args.rounds):
        for kind, each in timed.items():
            each.turn()
            record["models"][kind] |= each.record()
        save(record, args.out)
    print(table(record))
    keys = ("variant", "bytes_share", "loss_gap", "lambada_share")
    print(json.dumps({"best": {key: record["best"].get(key) for key in keys}}))


def keep_times(record: Record, before: Record) -> None:
    """Put in the times of an earlier record's models, with the settings and the environment in which they were measured. The
    losses are of the ledger as it is now, whose runs have environments of their own."""
    times = {_run_of(model): _times(model) for model in before["curve"]}
    for model in record["curve"]:  # `best` and `models` are among them
        model |= times.get(_run_of(model), {})
    record |= {name: before[name] for name in ("environment", "settings", "untrained") if name in before}
    record["losses_of"] = str(date.today())


def _run_of(model: Record) -> tuple[str, ...]:
    return tuple(model[name] for name in ("study", "variant", "budget"))


def _times(model: Record) -> Record:
    return {
        name: value for name, value in model.items() if name in ("timed", "exit_rate") or name.startswith("tokens_per_s_")
    }


def score_untrained(args: argparse.Namespace) -> None:
    """The original as it is, on the tasks of the studies and as they score: on a CPU that takes an hour."""
    record, study = json.loads(args.record.read_text()), read_study(args.study)
    (metrics,) = score(Path(SOURCE), read_wanted(study, args.tasks), "auto").values()
    record["untrained"] = {
        "source": SOURCE,
        "scores": {task: counted(one)[0] for task, one in metrics.items()},
        "environment": environment(),
    }
    save(record, args.record)
    print(table(record))


def save(record: Record, out: Path) -> None:
    out.write_text(json.dumps(record, indent=1) + "\n")


def table(record: Record) -> str:
    """For docs/conversion.md."""
    many = f"tokens_per_s_{record['settings']['rows']}_rows"
    lines = [
        "| model | plan | bytes | FLOPs | tokens/s, one row | "
        f"tokens/s, {record['settings']['rows']} rows | uptrained on | loss (above the original's) | WikiText-2 | LAMBADA | "
        "HellaSwag |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    if "untrained" in record:
        lines.append(_line("original, not trained", "", "1.00x", "1.00x", "", "", "0", outcome=record["untrained"]))
    for kind, found in record["models"].items():
        speeds = [f"{found[name]:,.0f}" if name in found else "-" for name in ("tokens_per_s_one_row", many)]
        shares = [f"{found[share]:.2f}x" for share in ("bytes_share", "flops_share")]
        budget = f"{found['tokens'] / 1e6:.0f}M"
        lines.append(_line(kind, f"`{found['variant']}`: {found['layout']}", *shares, *speeds, budget, outcome=found))
        for name in (name for name in found if name.startswith("exit_") and name != "exit_rate"):
            rate = f" ({found['exit_rate']:.0%} of those timed did)" if "exit_rate" in found else ""
            place = f"every token leaving after layer {name.removeprefix('exit_')}{rate}"
            lines.append(_line("", place, "", "", "", "", "", outcome=found[name]))
    return "\n".join(lines)


def _line(*cells: str, outcome: Record) -> str:
    scores = outcome["scores"]
    tasks = (f"{100 * scores[task]:.1f} %" if task in scores else "-" for task in ("lambada_openai", "hellaswag"))
    text = f"{scores['wikitext2_raw']:.2f}" if "wikitext2_raw" in scores else "-"
    more = outcome.get("original_tokens", 0) < outcome.get("tokens", 0)
    least = "" if outcome.get("equal_tokens", True) else " or more" if more else " or less"
    loss = f"{outcome['loss']:.3f}" if "loss" in outcome else "-"
    loss += f" (+{outcome['loss_gap']:.2f}{least})" if outcome.get("loss_gap") else ""
    return f"| {' | '.join((*cells, loss, text, *tasks))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    go = verbs.add_parser("run", help="time the models of the ledger and write the record")
    go.add_argument("--out", type=Path, required=True)
    go.add_argument("--studies", nargs="+", default=["uptrain", "uptrain-exits"], help="one of them has the original")
    go.add_argument("--ledger", type=Path, default=Path("benchmarks/results/study"))
    go.add_argument("--work", type=Path, default=Path("runs/study"), help="where runs kept their models")
    go.add_argument("--budget", type=float, default=0.6, help="part of the original's bytes that `best` may have")
    go.add_argument("--rows", type=int, default=64)
    go.add_argument("--rounds", type=int, default=5, help="0 writes what the ledger says and keeps the times of --out")
    go.add_argument("--waves", type=int, default=3, help="requests of a round for each row")
    go.add_argument("--new", type=int, default=128, help="new tokens of a request")
    go.add_argument("--threshold", type=float, default=0.9, help="confidence above which tokens exit")
    go.set_defaults(verb=run)
    bare = verbs.add_parser("untrained", help="score the original as it is, and add that to a record")
    bare.add_argument("record", type=Path)
    bare.add_argument("--tasks", type=Path, required=True, help="folder of the tasks' files")
    bare.add_argument("--study", default="compress", help="whose tasks are scored")
    bare.set_defaults(verb=score_untrained)
    show = verbs.add_parser("table", help="print a record's table")
    show.add_argument("record", type=Path)
    show.set_defaults(verb=lambda args: print(table(json.loads(args.record.read_text()))))
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
