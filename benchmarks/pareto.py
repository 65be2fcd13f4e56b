"""Loss against tokens per second: the models of a study in the engine, each at several batch sizes and with its own routing,
and at every maximum depth.

    fathomlm study run pareto --corpus CORPUS --keep
    python benchmarks/pareto.py run --out benchmarks/results/pareto_h200.json --corpus CORPUS --minutes 9   # again, to go on
    python benchmarks/pareto.py draw benchmarks/results/pareto_h200.json    # the picture and the tables beside it

Losses are those of the ledger, means over seeds. A model is timed as the run of the first seed kept it under --work, in
bfloat16 on a GPU, with memory for every sequence at its deepest; requests have a prompt of one token and about --mean new
ones, greedy. Each batch size is measured --rounds times, all models of one round before the next, behind a round that is not
counted. The speed at a batch size is the median; a model's best is that of its best batch size, so no side is held to
another's.

Test-time depth (thesis 4.6.3): the kept model's loss with tokens limited to 1, 2, ... recursions, as `fathomlm analyze
routing` has it, on the rows by which the study validates; and the engine's speed with requests limited so, at the model's
best batch size. These losses are of one seed and, on a GPU, of weights in bfloat16. The engine limits routed models only, so
that recursive ones have a loss at each depth and a speed at full depth.

The record grows over several calls: what is there is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from engine_scale_record import Record, open_record, source_hash, write_record
from engine_throughput import LONGEST, Bench
from pareto_page import depth_rows, draw, full_rows, page

import fathomlm
from fathomlm.checkpoints.writing import whole_file
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.errors import DataError, FathomError, OptionError
from fathomlm.jsonfile import read_object
from fathomlm.lab.analyze.depth_limits import measure_limits
from fathomlm.lab.common import environment, markdown
from fathomlm.lab.study.commands import open_place
from fathomlm.lab.study.jobs import Place
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import results_of
from fathomlm.lab.study.results import Row
from fathomlm.lab.study.spec import read_study
from fathomlm.lab.study.training import commit_of_checkout
from fathomlm.lab.token_rows import read_rows
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.schedule import row_length

EACH = 6
"""Requests for each concurrent sequence."""
LIKE_THE_LAST = 1.5
"""Seconds that a part is thought to take, to those of the longest one before it."""


@dataclass(frozen=True)
class Kept:
    """A variant of the study, and the model that one of its runs left."""

    row: Row
    model: FathomForCausalLM

    @property
    def name(self) -> str:
        return self.row.variant.name


def rows_of(study: str, ledger: Ledger) -> list[Row]:
    """Variants with a finished run, under the study's last budget that has any."""
    (results,) = results_of([read_study(study)], ledger)
    finished = [row for row in results.rows if row.records]
    if not finished:
        raise DataError(f"{ledger.directory} has no finished run of {study}; run `fathomlm study run {study} --keep`")
    return [row for row in finished if row.budget == finished[-1].budget]


def open_kept(row: Row, place: Place, device: torch.device) -> FathomForCausalLM | None:
    path = place.directory(row.job.run) / "last"
    if not path.exists():
        print(f"{row.variant.name}: there is no {path}; runs are kept by --keep", flush=True)
        return None
    model = fathomlm.load(path).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    assert isinstance(model, FathomForCausalLM)
    return model.eval()


def engine_of(bench: Bench, model: FathomForCausalLM, batch_size: int) -> Engine:
    longest = min(LONGEST, model.architecture.context)
    options = EngineOptions(batch_size=batch_size, max_length=longest)
    memory = ample_memory(model.decoder, options, longest)
    return bench.engine(model, batch_size, memory=memory, max_length=longest)


def head(args: argparse.Namespace, study: str) -> Record:
    """What is run and where; a record of something else is not continued."""
    here, package = Path(__file__).resolve().parent, Path(fathomlm.__file__).parent
    own = [here / name for name in ("pareto.py", "engine_throughput.py", "engine_scale_record.py")]
    gpu = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None
    return {
        "environment": environment(),
        "gpu": gpu,
        "source": source_hash([*package.rglob("*.py"), *own]),
        "commit": args.commit or commit_of_checkout(),
        "settings": {"study": study, "mean": args.mean, "rounds": args.rounds, "requests_for_each_sequence": EACH},
        "models": {},
    }


def described(row: Row) -> Record:
    """A model before anything is measured of it."""
    return {
        "loss": row.mean(), "seeds": sorted(row.records), "fingerprint": row.job.fingerprint, "tokens": row.job.tokens,
        "parameters": row.job.shaped.cost.non_embedding_parameters, "flops_per_token": row.job.shaped.flops_per_token,
        "recursions": row.job.shaped.parts.plan.recursions, "speeds": {}, "depths": [],
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise OptionError(f"--rounds must be >= 1, got {args.rounds}")
    begun, ledger = time.perf_counter(), Ledger(args.ledger)
    rows = rows_of(args.study, ledger)
    place = open_place(args.corpus, args.work)
    assert place.corpus is not None
    study = rows[0].job.run.study
    ledger.check_corpus(place.corpus_checksum, str(args.corpus), [study])
    record = open_record(args.out, head(args, study), mixed=args.mixed, fresh=args.fresh)
    bench = Bench(args)
    models = [Kept(row, model) for row in rows if (model := open_kept(row, place, bench.device)) is not None]
    if not models:
        raise DataError(f"{args.work} has no kept model of {args.study}; run `fathomlm study run {args.study} --keep`")
    for kept in models:
        new = described(kept.row)
        known = record["models"].setdefault(kept.name, new)
        if known["fingerprint"] != new["fingerprint"]:
            raise OptionError(f"{args.out} has another model named {kept.name}; --fresh begins a new record in its place")
        known |= {"loss": new["loss"], "seeds": new["seeds"]}
    done: Record = record["seconds"]
    for name, measure in parts_of(bench, models, place.corpus, record, args.batch_sizes):
        expected = LIKE_THE_LAST * max(done.values(), default=0.0)
        if args.minutes is not None and time.perf_counter() - begun + expected > 60 * args.minutes:
            print(f"{name} would not end within {args.minutes:g} minutes; call again to go on", flush=True)
            break
        started = time.perf_counter()
        measure()
        bench.clear()
        done[name] = round(time.perf_counter() - started, 1)
        write_record(with_best(record), args.out)
        print(f"{name}: {done[name]:.0f} s", flush=True)
    print("\n".join(["", *markdown(full_rows(record)), "", *markdown(depth_rows(record))]), flush=True)
    return 0


def parts_of(
    bench: Bench, models: list[Kept], corpus: Corpus, record: Record, batch_sizes: list[int]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is left to measure, each part with its name; what is best is known once all batch sizes are."""
    found = record["models"]
    for kept in models:
        if not found[kept.name]["depths"]:
            yield f"losses by depth, {kept.name}", partial(losses_by_depth, kept, corpus, found[kept.name])
    for batch_size in batch_sizes:
        if any(str(batch_size) not in found[kept.name]["speeds"] for kept in models):
            yield f"batch size {batch_size}", partial(speeds_of_all, bench, models, batch_size, found)
    for kept in models:
        limited, best = found[kept.name]["depths"][:-1], found[kept.name]["best"]["batch_size"]
        if kept.model.plan.routing is not None and any(at.get("speed", {}).get("batch_size") != best for at in limited):
            yield f"speeds by depth, {kept.name}", partial(speeds_by_depth, bench, kept, best, limited)


def losses_by_depth(kept: Kept, corpus: Corpus, found: Record) -> None:
    """On the rows by which the study validates, so that the last of them is the ledger's loss of that seed."""
    recipe = kept.row.job.shaped.recipe
    rows = read_rows([corpus], kept.model, context=row_length(recipe), rows=recipe.evaluate.rows or 10**6)
    found["depths"] = [
        {
            "max_depth": limit.max_depth, "loss": limit.loss, "log_likelihood": limit.log_likelihood[-1],
            "context": rows.context, "rows": len(rows), "mean_depth": limit.mean_depth,
            "flops_per_token": limit.flops_per_token,
        }
        for limit in measure_limits(kept.model, rows)
    ]  # fmt: skip
    found["ledger_loss_of_the_seed"] = kept.row.by_seed("loss").get(kept.row.job.run.seed)
    print(f"{kept.name}: " + ", ".join(f"{at['loss']:.4f} to depth {at['max_depth']}" for at in found["depths"]), flush=True)


def speeds_of_all(bench: Bench, models: list[Kept], batch_size: int, found: Record) -> None:
    engines = {kept.name: engine_of(bench, kept.model, batch_size) for kept in models}
    for name, speed in in_rounds(bench, {name: (engine, None) for name, engine in engines.items()}).items():
        found[name]["speeds"][str(batch_size)] = speed
        print(f"{name}, batch size {batch_size}: {speed}", flush=True)


def speeds_by_depth(bench: Bench, kept: Kept, batch_size: int, limited: list[Record]) -> None:
    engine = engine_of(bench, kept.model, batch_size)
    speeds = in_rounds(bench, {str(at["max_depth"]): (engine, at["max_depth"]) for at in limited})
    for at, speed in zip(limited, speeds.values(), strict=True):
        at["speed"] = speed | {"batch_size": batch_size}
        print(f"{kept.name}, at most {at['max_depth']}: {at['speed']}", flush=True)


def in_rounds(bench: Bench, engines: dict[str, tuple[Engine, int | None]]) -> dict[str, Record]:
    """The median speed of each engine with requests of a maximum depth; all of one round before the next."""
    rounds: dict[str, list[Record]] = {name: [] for name in engines}
    for turn in range(bench.args.rounds + 1):
        for name, (engine, max_depth) in engines.items():
            found = bench.throughput(engine, EACH * engine.runner.sizes.max_sequences, max_depth)
            if turn:
                rounds[name].append(found)
    told: dict[str, Record] = {}
    for name, counted in rounds.items():
        speeds, last = [one["tokens_per_s"] for one in counted], counted[-1]
        told[name] = {"tokens_per_s": round(statistics.median(speeds)), "rounds": speeds}
        told[name] |= {key: last[key] for key in ("inter_token_ms_p50", "mean_depth", "slots") if key in last}
    return told


def with_best(record: Record) -> Record:
    """With each model's best batch size, whose speed is that of its full depth, and whether another has a lower loss and is
    as fast: among all models, and among all of them at all depths."""
    models = [model for model in record["models"].values() if model["speeds"]]
    for model in models:
        best = max(model["speeds"], key=lambda size: model["speeds"][size]["tokens_per_s"])
        model["best"] = {"batch_size": int(best), "tokens_per_s": model["speeds"][best]["tokens_per_s"]}
        if model["depths"]:
            model["depths"][-1]["speed"] = model["speeds"][best] | {"batch_size": int(best)}
    mark_frontier([(model, model["best"]["tokens_per_s"]) for model in models])
    depths = [at for model in models for at in model["depths"]]
    mark_frontier([(at, at["speed"]["tokens_per_s"]) for at in depths if "speed" in at])
    return record


def mark_frontier(points: list[tuple[Record, int]]) -> None:
    for one, speed in points:
        one["on_the_frontier"] = not any(other["loss"] < one["loss"] and its_speed >= speed for other, its_speed in points)


def draw_record(path: Path) -> int:
    record = dict(read_object(path, error=OptionError).values)
    picture, text = path.with_suffix(".png"), path.with_suffix(".md")
    draw(record, picture)
    with whole_file(text) as temporary:
        temporary.write_text(page(record, path.name, picture.name), encoding="utf-8")
    print(f"{picture}, {text}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    runs = verbs.add_parser("run")
    add = runs.add_argument
    add("--out", type=Path, required=True, help="the record; one that is there is continued")
    add("--corpus", type=Path, required=True, help="the study's")
    add("--study", default="pareto")
    add("--ledger", type=Path, default=Path("benchmarks/results/study"))
    add("--work", type=Path, default=Path("runs/study"))
    add("--batch-sizes", type=int, nargs="+", default=[1, 32, 128, 256, 512])
    add("--rounds", type=int, default=3)
    add("--mean", type=float, default=256.0, help="new tokens of a request")
    add("--minutes", type=float, help="nothing is begun that would not end within these")
    add("--fresh", action="store_true", help="begin a new record in place of the one that is there")
    add("--mixed", action="store_true", help="continue a record of another source or GPU, which it then says")
    add("--commit", metavar="HASH", help="for the record, where this is not a git checkout")
    runs.set_defaults(tiny=True, requests=0, profile=0)
    verbs.add_parser("draw").add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        return draw_record(args.out) if args.verb == "draw" else run(args)
    except FathomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
