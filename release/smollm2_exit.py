"""SmolLM2-135M with an exit over frozen weights: what leaving early gives, and what it costs.

    python release/smollm2_exit.py prepare --corpus CORPUS --out data/smollm2
    python release/smollm2_chats.py make --documents data/smollm2/corpus --out data/chats.jsonl
    python release/smollm2_chats.py prepare --chats data/chats.jsonl --out data/smollm2-chats
    python release/smollm2_exit.py train --data data/smollm2 --chats data/smollm2-chats --seconds 540
    python release/smollm2_exit.py measure --data data/smollm2 --chats data/smollm2-chats --out smollm2_exit.json
    python release/smollm2_exit.py draw smollm2_exit.json benchmarks/results/smollm2_exit
    python release/smollm2_exit.py best smollm2_exit.json --pack PACK
    python release/smollm2_exit.py ship smollm2_exit.json --pack PACK --chats data/smollm2-chats --out DIRECTORY

`train` has one run for each design of an adapter, `rank128` and the like (recipes/exit-adapter-smollm2-135m.yaml) or `layer`
(recipes/exit-layer-smollm2-135m.yaml), with an adapter at every exit layer in it: nothing but the exits learns, so they do
not disturb each other, and the frozen layers run once for all. With `--chats` it learns from documents and from the model's
own chats, as much of the one as of the other. Training may be stopped (`--seconds`) and goes on.

`measure` adds to a record that is there, one entry for each device, design, layer, choice of words and number of drafts, on
the engine, greedy, one sequence: speculative decoding, whose text must be full decoding's, and parallel
decoding, whose text is judged by the full model. `static` tells what a pass up to the exit and through its adapter costs,
the least that any of them pays for a token: where speculative decoding gains nothing, it and the passes a token say why.
It computes in float32 by default, as `fathomlm chat smollm2-135m` does: in bfloat16 a pass of several tokens rounds in other
ways than passes of one, and where two words are nearly as likely the text goes another way. `best` names the exit to ship:
the largest geometric mean of the devices' speculative speeds; `ship` makes of it what the package holds. What each layer
knows is added by smollm2_readout.py.
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
from bundled_measure import chosen, revision
from bundled_mor import Deadline, verb
from smollm2_exit_measure import THRESHOLDS, measure_run
from smollm2_exit_report import entry_name
from smollm2_mix import mix

from fathomlm.lab.common import environment

LAYERS = (2, 4)
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

    deadline, corpus = Deadline(args.seconds), learnt_from(args)
    for design in args.designs:
        if deadline.over:
            break
        words = [
            *("--model.source", args.source),
            *("--data.path", str(corpus)),
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


def learnt_from(args: argparse.Namespace) -> Path:
    """The corpus of the runs: documents, or documents and chats together."""
    documents: Path = args.data / "corpus"
    return documents if args.chats is None else mix(documents, args.chats, args.work / "mixed").path


def measure(args: argparse.Namespace) -> None:
    import torch

    from fathomlm.train.reading import read_recipe
    from fathomlm.train.report import read_records

    args.prompts_from = args.prompts_from or (["documents"] if args.chats is None else ["chats", "documents"])
    if "chats" in args.prompts_from and args.chats is None:
        raise SystemExit("prompts from chats need --chats, a corpus that `smollm2_chats.py prepare` made")
    device = chosen(args.device)
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    name = device if args.dtype == "float32" else f"{device}, {args.dtype}"
    place = record["runs"].setdefault(name, {"environment": environment(), "revision": revision(), "exits": {}})
    names = ("dtype", "prompts_from", "prompts", "prompt_tokens", "new_tokens", "rounds")
    settings = {name: getattr(args, name) for name in names}
    if place.setdefault("settings", settings) != settings:
        raise SystemExit(f"{args.out} was measured with other settings on {name}; name another file")
    corpus = learnt_from(args)
    for design in args.designs:
        run = design.run(args.work)
        print(f"{name}: {design.label}", flush=True)
        held_out = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "validation"]
        record.setdefault("training", {})[design.label] = [{"tokens": r["tokens"], "exits": r["exits"]} for r in held_out]
        learnt = {"design": design.label, "rank": design.rank, "run": str(run), "tokens": held_out[-1]["tokens"]}
        learnt |= {"chats": args.chats is not None, "seed": read_recipe(run / "recipe.yaml").seed}
        for found in measure_run(args, run / "last", corpus, torch.device(device)):
            found |= learnt
            place["exits"][entry_name(found)] = found
            args.out.write_text(json.dumps(record) + "\n")


def draw(args: argparse.Namespace) -> None:
    from smollm2_exit_picture import picture
    from smollm2_exit_report import table

    record = json.loads(args.record.read_text())
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(table(record))
    picture(record, Path(f"{args.stem}.png"))
    print(table(record))


def best(args: argparse.Namespace) -> None:
    from smollm2_exit_report import choose, describe_choice

    choice = choose(json.loads(args.record.read_text()))
    print(describe_choice(choice, args.pack or Path("exits")))
    if args.pack is not None:
        write_one(choice, args.pack)


def ship(args: argparse.Namespace) -> None:
    import smollm2_exit_ship

    print(json.dumps(smollm2_exit_ship.ship(args)))


def write_one(choice: dict[str, Any], out: Path) -> None:
    """A pack of one exit of a run that has several, in bfloat16, with the words that it was measured with."""
    import torch
    from smollm2_exit_measure import exit_vocab_for

    from fathomlm.checkpoints.assemble import replan
    from fathomlm.checkpoints.exit_pack import write_pack
    from fathomlm.checkpoints.resolve import load

    model = load(Path(choice["run"]) / "last")
    model.limit_exits(exit_vocab_for(model, Path(choice["corpus"]), choice["words"]))
    plan = model.plan.with_exits((choice["layer"] - 1,), layer=model.config.exit_parts.layer)
    write_pack(replan(model, plan, **model.config.exit_fields), out, dtype=torch.bfloat16)
    print(f"{out}: the exit after layer {choice['layer']} alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    add = verb(verbs, "prepare", prepare)
    add("--corpus", type=Path, required=True, help="train-*.jsonl.xz and val.jsonl.xz, with `text` and `source`")
    add("--out", type=Path, required=True)
    add("--source", default="smollm2-135m", help="the model, which has the tokenizer")
    add("--max-tokens", type=int, help="stop at about so many")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add = verb(verbs, "train", train)
    _add_runs(add)
    add("--source", default="smollm2-135m")
    add("--tokens", default="60M")
    add("--seconds", type=float, help="stop and save after so long; the same command goes on")
    add("--fields", nargs="*", default=[], help="other values for the recipe: --fields device=cpu data.context=512")
    add = verb(verbs, "measure", measure)
    _add_runs(add)
    add("--out", type=Path, required=True, help="the record, added to where it is there")
    add("--device", default="auto")
    add("--thresholds", type=float, nargs="*", default=list(THRESHOLDS), help="tried beside the adaptive one")
    kinds = "documents to continue, chats to answer, or both (both where --chats is given)"
    add("--prompts-from", nargs="+", choices=("chats", "documents"), help=kinds)
    add("--prompts", type=int, default=8, help="of each kind; as many others calibrate")
    add("--prompt-tokens", type=int, default=48, help="the length of a prompt from a document")
    add("--new-tokens", type=int, default=128, help="the most of them; texts also end where the model ends them")
    add("--modes", nargs="+", choices=("speculative", "parallel"), default=["speculative", "parallel"])
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add(
        "--exit-vocab",
        type=int,
        nargs="+",
        help="let exits choose among the N most frequent tokens; 0 is all (what they learnt)",
    )
    add("--max-stack", type=int, nargs="+", default=[8], help="drafts that may wait")
    add("--rounds", type=int, default=2, help="how often texts are made; each text's fastest counts")
    add("--rows", type=int, default=32, help="held-out texts of each kind that the exit's loss is taken over")
    add = verb(verbs, "draw", draw)
    add("record", type=Path)
    add("stem")
    add = verb(verbs, "best", best)
    add("record", type=Path)
    add("--pack", type=Path, help="also write that exit alone into this directory")
    add = verb(verbs, "ship", ship)
    add("record", type=Path)
    add("--pack", type=Path, required=True, help="the exit, written by `best`")
    add("--source", default="smollm2-135m")
    add("--chats", type=Path, required=True, help="what `smollm2_chats.py prepare` made: its held-out ones calibrate")
    messages = Path(__file__).parents[1] / "tests/packaged/held_out_messages.txt"
    add("--messages", type=Path, default=messages, help="what the tests ask, a line each")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


def _add_runs(add: Any) -> None:
    add("--data", type=Path, required=True, help="what `prepare` made")
    add("--chats", type=Path, help="what `smollm2_chats.py prepare` made: learn from it too, and measure on it")
    add("--work", type=Path, default=Path("runs/smollm2-exit"))
    add("--layers", type=int, nargs="+", default=list(LAYERS))
    designs = "what exits have: rank128, any other rank, or layer"
    add("--designs", type=Design.parse, nargs="+", default=[Design.parse(name) for name in DESIGNS], help=designs)


if __name__ == "__main__":
    main()
