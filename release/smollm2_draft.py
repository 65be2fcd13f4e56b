"""SmolLM2-135M with a draft layer behind it: trained, packed, and measured against full decoding.

    python release/smollm2_exit.py prepare --corpus CORPUS --out data/smollm2
    python release/smollm2_chats.py make --documents data/smollm2/corpus --out data/chats.jsonl --count 60000
    python release/smollm2_chats.py prepare --chats data/chats.jsonl --out data/smollm2-chats
    python release/smollm2_draft.py train --data data/smollm2 --chats data/smollm2-chats --seconds 540
    python release/smollm2_draft.py pack --out DIRECTORY
    python release/smollm2_draft.py prompts --data data/smollm2 --chats data/smollm2-chats --out prompts.json
    python release/smollm2_draft.py measure --pack DIRECTORY --prompts prompts.json --out smollm2_draft_h200.json
    python release/smollm2_draft.py ship smollm2_draft_h200.json --pack DIRECTORY --tokens 200M --out DIRECTORY

`train` (recipes/draft-smollm2-135m.yaml) learns from documents and from the model's own chats (`--share`), and may be
stopped (`--seconds`) and goes on. `measure` (smollm2_draft_measure.py) adds to a record that is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bundled_mor import Deadline, verb
from smollm2_mix import mix

RUN = Path("runs/smollm2-draft")
CARD = Path(__file__).parent / "smollm2_draft_card.md"


class Watcher(Deadline):
    """Tells how far drafts are from the model; the model itself stays as it is."""

    def record(self, record: dict[str, Any]) -> None:
        parts = record["parts"]
        far = " ".join(f"{parts[name]:.3f}" for name in parts if name.endswith("_distill"))
        rate = f", {record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else ""
        print(f"  {record['kind']:10} step {record['step']:5} {record['tokens'] / 1e6:6.1f}M  {far}{rate}", flush=True)


def train(args: argparse.Namespace) -> None:
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.run import train as train_run

    documents = args.data / "corpus"
    corpus = documents if args.chats is None else mix(documents, args.chats, args.work / "mixed", args.share).path
    source = args.source if args.start is None else str(started(args))
    words = [
        *("--model.source", source),
        *("--data.path", str(corpus)),
        *("--out", str(args.work / "run")),
        *("--budget.tokens", args.tokens),
        *("--log.tensorboard", "false"),
    ]
    recipe = read_recipe("draft-smollm2-135m", [*words, *(f"--{field}" for field in args.fields)])
    summary = train_run(recipe, resume=True, watcher=Watcher(args.seconds))
    ended = "finished" if summary.finished else "stopped and saved"
    print(f"{ended} at step {summary.step} of {summary.steps}; drafts {summary.exits}", flush=True)


def started(args: argparse.Namespace) -> Path:
    """The model with an earlier draft layer, which the run goes on from: what it has is kept."""
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.resolve import load

    out: Path = args.work / "start"
    if not out.exists():
        save(load(args.source, exits=args.start), out)
    return out


def pack(args: argparse.Namespace) -> None:
    import torch

    from fathomlm.checkpoints.exit_pack import write_pack
    from fathomlm.checkpoints.resolve import load

    write_pack(load(args.work / "run/last"), args.out, dtype=torch.bfloat16, force=True)
    print(f"{args.out}: {sum(path.stat().st_size for path in args.out.iterdir()) / 1e6:.1f} MB")


def prompts(args: argparse.Namespace) -> None:
    from smollm2_draft_measure import make_prompts

    args.out.write_text(json.dumps(make_prompts(args)) + "\n")


def measure(args: argparse.Namespace) -> None:
    from smollm2_draft_measure import measure as measure_all

    measure_all(args)


def ship(args: argparse.Namespace) -> None:
    """The pack with a card and a record of what it was measured to do: what the package holds."""
    import shutil

    from fathomlm.checkpoints.exit_pack import RECORD, WEIGHTS, read_pack
    from fathomlm.checkpoints.writing import whole_directory

    pack, measured = read_pack(args.pack), json.loads(args.record.read_text())
    settings = {name: found for name, found in measured.items() if "speedup" in found}
    kinds = ("chats", "documents", "summaries")
    lines = []
    for name, found in settings.items():
        each = " | ".join(f"{found[kind]['speedup']:.2f}" for kind in kinds)
        place, _, rows = name.replace("rows", " sequences").replace("1row", "one sequence").partition("_")
        drafts = str(found["drafts"])
        drafts = drafts if drafts.startswith("best") else f"tree {drafts}" if "," in drafts else f"{drafts} drafts"
        what = f"two cores, {rows}, {drafts}" if place == "cpu" else f"H200, {place}, {rows}, {drafts}"
        lines.append(
            f"| {what} | {found['speedup']:.2f} | {found['tokens_per_pass']:.2f} | {each} | {found['same_text']:.0%} |"
        )
    size = sum((args.pack / name).stat().st_size for name in (RECORD, WEIGHTS))
    many = sum(value.numel() for value in pack.tensors.values())
    words = pack.architecture.vocab if pack.exit_vocab is None else len(pack.exit_vocab)
    figures = {"parameters": f"{many / 1e6:.1f}M", "bytes": f"{size / 1e6:.1f}", "tokens": args.tokens}
    card = CARD.read_text().format(**figures, words=f"{words:,}", speeds="\n".join(lines))
    record = {"recipe": "draft-smollm2-135m", "tokens": args.tokens, "parameters": many, "words": words}
    record |= {name: {k: v for k, v in found.items() if k != "tried"} for name, found in settings.items()}
    with whole_directory(args.out, True, what="draft layer", sign=RECORD) as directory:
        for name in (RECORD, WEIGHTS):
            shutil.copyfile(args.pack / name, directory / name)
        (directory / "README.md").write_text(card)
        (directory / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{args.out}: {size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    add = verb(verbs, "train", train)
    add("--data", type=Path, required=True, help="what `smollm2_exit.py prepare` made")
    add("--chats", type=Path, help="what `smollm2_chats.py prepare` made: learn from it too")
    add("--share", type=float, default=0.5, help="of the tokens that are chats")
    add("--work", type=Path, default=RUN)
    add("--source", default="smollm2-135m")
    add("--start", type=Path, metavar="PACK", help="a draft layer of an earlier run to go on from")
    add("--tokens", default="200M")
    add("--seconds", type=float, help="stop and save after so long; the same command goes on")
    add("--fields", nargs="*", default=[], help="other values for the recipe: --fields device=cpu data.context=512")
    add = verb(verbs, "pack", pack)
    add("--work", type=Path, default=RUN)
    add("--out", type=Path, required=True)
    add = verb(verbs, "prompts", prompts)
    add("--data", type=Path, required=True, help="what `smollm2_exit.py prepare` made")
    add("--chats", type=Path, required=True, help="what `smollm2_chats.py prepare` made")
    add("--source", default="smollm2-135m")
    add("--count", type=int, default=32, help="of each kind")
    add("--out", type=Path, required=True)
    add = verb(verbs, "measure", measure)
    add("--pack", type=Path, required=True)
    add("--prompts", type=Path, required=True, help="what `prompts` made")
    add("--source", default="smollm2-135m")
    add("--out", type=Path, required=True, help="the record, added to where it is there")
    add("--device", default="auto")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--drafts", type=int, nargs="*", default=[4, 5, 6], help="drafts in a step; each number is tried")
    add("--trees", nargs="*", default=[], help="trees of drafts to try too, such as 4,2,1 2,1,1")
    add("--best", nargs="*", default=[], help="trees of the likeliest drafts to try too, such as 15,6")
    add("--threshold", type=float, default=0.0, help="draft on while the layer is surer than this")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    add("--count", type=int, default=32, help="prompts of each kind")
    add("--new-tokens", type=int, default=192)
    add("--rounds", type=int, default=2)
    add = verb(verbs, "ship", ship)
    add("record", type=Path)
    add("--pack", type=Path, required=True)
    add("--tokens", required=True, help="that it was trained on, such as 200M")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
