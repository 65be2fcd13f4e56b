"""SmolLM2-135M with an exit over frozen weights: what leaving early gives, and what it costs.

    python benchmarks/smollm2_exit.py prepare --corpus CORPUS --out data/smollm2
    python benchmarks/smollm2_exit.py train --data data/smollm2 --work runs/smollm2-exit --seconds 540
    python benchmarks/smollm2_exit.py measure --data data/smollm2 --work runs/smollm2-exit --out smollm2_exit.json
    python benchmarks/smollm2_exit.py draw smollm2_exit.json benchmarks/results/smollm2_exit

`train` has one run for each design of an adapter, `rank128` and the like (recipes/exit-adapter-smollm2-135m.yaml) or `layer`
(recipes/exit-layer-smollm2-135m.yaml), with an adapter at every exit layer in it: nothing but the exits learns, so they do
not disturb each other, and the frozen layers run once for all. Training may be stopped (`--seconds`) and goes on. `measure`
adds to a record that is there, one entry for each device, design and layer, on captured steps (decode/captured.py), greedy,
one row: speculative decoding, whose text must be full decoding's, and parallel decoding, whose text is judged by the full
model. `static` tells what a pass up to the exit and through its adapter costs, the least that any of them pays for a token:
where speculative decoding gains nothing, it and the passes a token say why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bundled_data
from bundled_measure import revision
from bundled_mor import Deadline
from environment import environment
from smollm2_exit_measure import THRESHOLDS, measure_exit

LAYERS = (10, 16)
DESIGNS = ("rank128", "rank1024", "layer")
"""A rank of 1,024 is 1.2M weights, 2.4 MB in bfloat16; a layer of the model's shape 3.5M, 7.1 MB."""


def prepare(args: argparse.Namespace) -> None:
    """The text that the bundled model learns from too, in this model's tokens: what ships has the same sources."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    text = args.out / "text"
    bundled_data.filter_text(args.corpus, text)
    corpus = prepare(
        PrepareOptions(
            sources=(str(text / "train-*.jsonl"),),
            validation_from=(str(text / "val.jsonl"),),
            out=args.out / "corpus",
            tokenizer=args.source,
            shard_tokens=24_000_000,
            max_tokens=args.max_tokens,
            workers=args.workers,
        )
    )
    print(json.dumps({name: split.tokens for name, split in corpus.manifest.splits.items()}))


@dataclass(frozen=True)
class Design:
    """What an exit has in front of the final norm: a low-rank adapter, or a layer of its own."""

    name: str
    rank: int | None
    """None for a layer."""

    @classmethod
    def parse(cls, text: str) -> Design:
        found = re.fullmatch(r"layer|rank([1-9][0-9]*)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"a design is 'layer' or a rank such as 'rank128', got '{text}'")
        return cls("layer", None) if found[1] is None else cls(f"rank {found[1]}", int(found[1]))

    @property
    def label(self) -> str:
        return "own layer" if self.rank is None else self.name

    @property
    def recipe(self) -> str:
        return "exit-layer-smollm2-135m" if self.rank is None else "exit-adapter-smollm2-135m"

    @property
    def fields(self) -> list[str]:
        """What the recipe leaves to the design."""
        return [] if self.rank is None else ["--loss.exits.adapter_rank", str(self.rank)]

    def run(self, work: Path) -> Path:
        return work / self.name.replace(" ", "-")


def train(args: argparse.Namespace) -> None:
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.run import train as train_run

    deadline = Deadline(args.seconds)
    for design in args.designs:
        if deadline.over:
            break
        words = [
            *("--model.source", args.source),
            *("--data.path", str(args.data / "corpus")),
            *("--out", str(design.run(args.work))),
            *("--budget.tokens", args.tokens),
            *("--loss.exits.at", str(args.layers)),
            *design.fields,
            *("--log.tensorboard", "false"),
        ]
        recipe = read_recipe(design.recipe, [*words, *(f"--{field}" for field in args.fields)])
        print(f"{design.label}: {recipe.directory}", flush=True)
        summary = train_run(recipe, resume=True, watcher=deadline)
        ended = "finished" if summary.finished else "stopped and saved"
        print(f"{design.label}: {ended} at step {summary.step} of {summary.steps}; exits {summary.exits}", flush=True)


def measure(args: argparse.Namespace) -> None:
    import torch

    from fathomlm.train.report import read_records

    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    place = record["runs"].setdefault(device, {"environment": environment(), "revision": revision(), "exits": {}})
    settings = {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "new_tokens", "max_stack", "pack")}
    if place.setdefault("settings", settings) != settings:
        raise SystemExit(f"{args.out} was measured with other settings on {device}; name another file")
    for design in args.designs:
        run = design.run(args.work)
        validations = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "validation"]
        for layer in args.layers:
            found = measure_exit(args, run / "last", layer, torch.device(device))
            found |= {"layer": layer, "design": design.label, "rank": design.rank}
            found |= {"tokens": validations[-1]["tokens"], "losses": validations[-1]["parts"]}
            name = f"layer {layer}, {design.label}"
            place["exits"][name] = found
            args.out.write_text(json.dumps(record) + "\n")
            best = max(found["speculative"].values(), key=lambda one: one["speedup"])
            print(f"{device} {name}: speculative {best['speedup']:.2f}x at best", flush=True)


def draw(args: argparse.Namespace) -> None:
    from smollm2_exit_report import picture, table

    record = json.loads(args.record.read_text())
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(table(record))
    picture(record, Path(f"{args.stem}.png"))
    print(table(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)

    def verb(name: str, run: Any) -> Any:
        found = verbs.add_parser(name)
        found.set_defaults(run=run)
        return found.add_argument

    add = verb("prepare", prepare)
    add("--corpus", type=Path, required=True, help="train-*.jsonl.xz and val.jsonl.xz, with `text` and `source`")
    add("--out", type=Path, required=True)
    add("--source", default="smollm2-135m", help="the model, which has the tokenizer")
    add("--max-tokens", type=int, help="stop at about so many")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add = verb("train", train)
    _add_runs(add)
    add("--source", default="smollm2-135m")
    add("--tokens", default="60M")
    add("--seconds", type=float, help="stop and save after so long; the same command goes on")
    add("--fields", nargs="*", default=[], help="other values for the recipe: --fields device=cpu data.context=512")
    add = verb("measure", measure)
    _add_runs(add)
    add("--out", type=Path, required=True, help="the record, added to where it is there")
    add("--device", default="auto")
    add("--thresholds", type=float, nargs="*", default=list(THRESHOLDS), help="tried beside the adaptive one")
    add("--prompts", type=int, default=8, help="documents to continue; as many others calibrate")
    add("--prompt-tokens", type=int, default=48)
    add("--new-tokens", type=int, default=128)
    add("--max-stack", type=int, default=8, help="drafts that may wait")
    add("--pack", action=argparse.BooleanOptionalAction, default=True, help="weights in fewer, larger matrices")
    add = verb("draw", draw)
    add("record", type=Path)
    add("stem")
    args = parser.parse_args()
    args.run(args)


def _add_runs(add: Any) -> None:
    add("--data", type=Path, required=True, help="what `prepare` made")
    add("--work", type=Path, default=Path("runs/smollm2-exit"))
    add("--layers", type=int, nargs="+", default=list(LAYERS))
    designs = "what exits have: rank128, any other rank, or layer"
    add("--designs", type=Design.parse, nargs="+", default=[Design.parse(name) for name in DESIGNS], help=designs)


if __name__ == "__main__":
    main()
