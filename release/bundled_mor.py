"""The model that comes with FathomLM, and the plain one it is held against (thesis 4): data, training, figures.

    python release/bundled_mor.py prepare --corpus CORPUS --out data/bundled     # text, tokenizer, tokens, pieces
    python release/bundled_mor.py train --data data/bundled --work runs --only mor --seconds 540
    python release/bundled_mor.py train --data data/bundled --work runs          # goes on; both, to the end
    python release/bundled_mor.py measure --data data/bundled --work runs --out bundled_mor.json
    python release/bundled_mor.py speed --work runs --out bundled_mor.json
    python release/bundled_mor.py draw bundled_mor.json benchmarks/results/bundled_mor
    python release/bundled_mor.py ship bundled_mor.json --data data/bundled --work runs --out DIRECTORY

`pack` makes pieces of the tokens that fit through a narrow door, `unpack` sets them together again; `split` and `join` do
the same with a run, so that one on another machine goes on where it stopped, bit for bit. `train --cool-down 600M` ends a
run early: it branches from the plateau's last checkpoint and cools down for that budget.

The shape. At most 24 MB in int8 with a float32 scale a row is about 23.8M weights; 12,288 tokens of width 512 take 6.3M of
them. Weighed at heads of 64, N_r = 3, middle-cycle, context 1024, counted by fathomlm.depth.cost (forward, MFLOPs a token,
without the head; beside it the plain model as deep and wide):

| hidden | inner | heads/kv | layout | unrolled | weights | with embedding | int8 | MFLOPs | plain: weights | MFLOPs |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| 448 | 1216 | 8/4 | 1+5+1 | 17 | 16.3M | 21.8M | 21.9 MB | 66.0 | 39.5M |  96.8 |
| 512 | 1408 | 8/2 | 1+4+1 | 14 | 16.9M | 23.2M | 23.4 MB | 65.0 | 39.5M |  93.6 |
| 512 | 1408 | 8/4 | 1+4+1 | 14 | 17.7M | 24.0M | 24.2 MB | 67.6 | 41.3M |  97.3 |
| 512 | 1792 | 8/4 | 1+3+1 | 11 | 17.7M | 24.0M | 24.2 MB | 63.6 | 38.9M |  89.4 |
| 576 | 1536 | 9/3 | 1+2+1 |  8 | 14.2M | 21.2M | 21.4 MB | 48.5 | 28.3M |  66.1 |

The second is the largest that fits and keeps four layers in the loop; it is also what the first small comparison trained,
with fewer keys and values. The recipes are recipes/bundled-mor.yaml and bundled-vanilla.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import bundled_data as data

RECIPES = {"mor": "bundled-mor", "vanilla": "bundled-vanilla"}


class Deadline:
    """A run's watcher that asks it to stop, as Ctrl-C would, once a time has come; it then saves and can be resumed."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if self.over:
            signal.raise_signal(signal.SIGTERM)

    def record(self, record: dict[str, Any]) -> None:
        loss = record["parts"].get("causal", record["loss"])
        rate = f", {record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else ""
        print(f"  {record['kind']:10} step {record['step']:5} {record['tokens'] / 1e6:6.0f}M  {loss:.4f}{rate}", flush=True)

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)


def prepare(args: argparse.Namespace) -> None:
    from fathomlm.train.data.tokenizers import find_tokenizer, fingerprint

    text, tokenizer, out = args.out / "text", args.out / "tokenizer", args.out
    counts = data.filter_text(args.corpus, text)
    if args.tokenizer is not None:
        find_tokenizer(args.tokenizer).save_pretrained(tokenizer)
    elif not (tokenizer / "tokenizer.json").exists():
        data.learn_tokenizer(sorted(text.glob("train-*.jsonl")), args.vocab, args.sample).save_pretrained(tokenizer)
    corpus = data.prepare_tokens(text, tokenizer, out / "corpus", args.workers)
    splits = {name: split.tokens for name, split in corpus.manifest.splits.items()}
    record = {
        "sources": counts,
        "left_out": data.LEFT_OUT,
        "vocab": corpus.manifest.vocab,
        "fingerprint": fingerprint(corpus.load_tokenizer()),
        "tokens": splits,
        "characters_per_token": sum(c["characters"] for c in counts.values()) / splits["train"],
    }
    (out / "data.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def pack(args: argparse.Namespace) -> None:
    for piece in data.pack(args.data / "corpus", args.out, args.workers):
        print(f"{piece}: {piece.stat().st_size:,} bytes")


def recipe_of(name: str, args: argparse.Namespace, *words: str) -> Any:
    from fathomlm.train.reading import read_recipe

    path = ["--data.path", str(args.data / "corpus"), "--out", str(args.work / RECIPES[name])]
    return read_recipe(RECIPES[name], [*path, "--log.tensorboard", "false", *args.fields, *words])


def cooled(name: str, args: argparse.Namespace) -> Any:
    """The recipe that ends a run at a smaller budget, from its last checkpoint."""
    run = args.work / RECIPES[name]
    branch = ["--out", f"{run}-cooled", "--branch_from", str((run / "last").resolve())]
    return recipe_of(name, args, "--budget.tokens", args.cool_down, *branch)


def train(args: argparse.Namespace) -> None:
    """Each model to its end or the deadline. What is finished is left alone, what was stopped goes on."""
    from fathomlm.train.run import train as train_run

    deadline = Deadline(args.seconds)
    for name in args.only or RECIPES:
        if deadline.over:
            break
        recipe = cooled(name, args) if args.cool_down else recipe_of(name, args)
        print(f"{name}: {recipe.directory}", flush=True)
        summary = train_run(recipe, resume=True, watcher=deadline)
        ended = "finished" if summary.finished else "stopped and saved"
        print(f"{name}: {ended} at step {summary.step} of {summary.steps}, {summary.tokens:,} tokens", flush=True)


def measure(args: argparse.Namespace) -> None:
    """Adds to a record that is there: one machine may have trained one model, another the other."""
    import bundled_measure

    record = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    for name in args.only or RECIPES:
        record["runs"][name] = bundled_measure.measure(args, _finished(args.work, name))
        args.out.write_text(json.dumps(record) + "\n")
        print(json.dumps({name: record["runs"][name]["validation"]}), flush=True)


def speed(args: argparse.Namespace) -> None:
    """Both models in the engine, in one run; adds to the record."""
    import bundled_measure

    record = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    paths = {name: _finished(args.work, name) / "int8" for name in RECIPES}
    paths |= {} if args.mor is None else {"mor": args.mor}
    record["engine"] = bundled_measure.engine_speeds(paths, args.device)
    args.out.write_text(json.dumps(record) + "\n")
    print(json.dumps(record["engine"]))


def _finished(work: Path, name: str) -> Path:
    """A model's run: the cooled one where there is one."""
    plain = work / RECIPES[name]
    cool = plain.with_name(f"{plain.name}-cooled")
    return cool if cool.exists() else plain


def draw(args: argparse.Namespace) -> None:
    import bundled_report

    record = json.loads(args.record.read_text())
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(bundled_report.table(record))
    bundled_report.picture(record, Path(f"{args.stem}.png"))
    print(bundled_report.table(record))


def ship(args: argparse.Namespace) -> None:
    import bundled_ship

    found = json.loads(args.record.read_text())["runs"]["mor"]
    described = json.loads((args.data / "data.json").read_text())
    print(json.dumps(bundled_ship.ship(_finished(args.work, "mor"), found, described, args.held_out, args.out)))


def verb(verbs: Any, name: str, run: Any) -> Any:
    """A verb of a script; what adds arguments to it is returned."""
    found = verbs.add_parser(name)
    found.set_defaults(run=run)
    return found.add_argument


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    workers = len(os.sched_getaffinity(0))
    add = verb(verbs, "prepare", prepare)
    add("--corpus", type=Path, required=True, help="train-*.jsonl.xz and val.jsonl.xz, with `text` and `source`")
    add("--out", type=Path, required=True)
    add("--tokenizer", metavar="NAME", help="a model's, such as fathom-mor-23m, instead of a new one")
    add("--vocab", type=int, default=data.VOCAB)
    add("--sample", type=int, default=data.SAMPLE, help="characters that the tokenizer is learnt from")
    add("--workers", type=int, default=workers)
    add = verb(verbs, "pack", pack)
    add("--data", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--workers", type=int, default=workers)
    add = verb(verbs, "unpack", lambda args: data.unpack(args.pieces, args.data / "corpus"))
    add("pieces", type=Path, nargs="+")
    add("--data", type=Path, required=True)
    add = verb(verbs, "split", lambda args: print("\n".join(map(str, data.split(args.run_directory, args.out)))))
    add("run_directory", type=Path)
    add("--out", type=Path, required=True)
    add = verb(verbs, "join", lambda args: data.join(args.parts, args.work))
    add("parts", type=Path, nargs="+")
    add("--work", type=Path, required=True)
    add = verb(verbs, "train", train)
    _add_runs(add)
    add("--seconds", type=float, help="stop and save after so long; the same command goes on")
    add("--cool-down", metavar="TOKENS", help="branch from the plateau and end at this budget")
    add("--fields", nargs="*", default=[], help="other values for the recipes: --fields budget.tokens=1M device=cpu")
    add = verb(verbs, "measure", measure)
    _add_runs(add)
    add("--out", type=Path, required=True)
    add("--rows", type=int, default=512, help="rows of the validation split")
    add("--device", default="auto")
    add("--trained-on", default="one NVIDIA H200", help="the machine that trained, for the table")
    add = verb(verbs, "speed", speed)
    add("--work", type=Path, default=Path("runs"))
    add("--mor", type=Path, help="the stored model, where it is not in --work")
    add("--out", type=Path, required=True)
    add("--device", default="auto")
    add = verb(verbs, "draw", draw)
    add("record", type=Path)
    add("stem")
    add = verb(verbs, "ship", ship)
    add("record", type=Path, help="what `measure` wrote")
    add("--data", type=Path, required=True)
    add("--work", type=Path, default=Path("runs"))
    add("--held-out", type=Path, default=Path(__file__).parents[1] / "tests/packaged/held_out.txt")
    add("--out", type=Path, required=True, help="replaced where it is a model already")
    args = parser.parse_args()
    if "fields" in args:
        args.fields = [f"--{field}" for field in args.fields]
    args.run(args)


def _add_runs(add: Any) -> None:
    add("--data", type=Path, required=True, help="what `prepare` or `unpack` made")
    add("--work", type=Path, default=Path("runs"))
    add("--only", nargs="*", choices=list(RECIPES))


if __name__ == "__main__":
    main()
