"""`fathomlm export`: a recursive model out as a plain Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fathomlm.cli.progress import amount, layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument

HELP = "write an unrolled plain Hugging Face checkpoint"
DESCRIPTION = (
    "Writes MODEL as a plain Hugging Face checkpoint in the directory OUT: every step a layer of its own, LoRA and DoRA "
    "merged in. It is as large as the untied model, and transformers and whatever else reads that format can serve it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a FathomLM directory (or any other model source)")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; must not exist unless --force")
    add_dtype_argument(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a model directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.export import exits_in_words, export
    from fathomlm.checkpoints.families import family_for
    from fathomlm.checkpoints.resolve import describe, dtype_name, load
    from fathomlm.checkpoints.save import directory_bytes
    from fathomlm.checkpoints.writing import check_target

    check_target(args.out, args.force)
    model = load(args.model, dtype=args.dtype)
    with layer_bar("exporting") as tick:
        export(model, args.out, force=args.force, on_layer=tick)
    kind = family_for(model.architecture).architecture_class
    size = directory_bytes(args.out)
    if args.json:
        record = {
            "model": args.model,
            "out": str(args.out),
            "class": kind,
            "layers": model.plan.unrolled_layers,
            "bytes": size,
            "left_out": exits_in_words(model) if model.plan.exits else None,
        }
        print(json.dumps(record))
        return 0
    if model.relaxation is not None and dtype_name(model) != "float32":
        print(
            f"  what each step adds was merged and rounded to {dtype_name(model)}; --dtype float32 keeps it exact",
            file=sys.stderr,
        )
    if model.plan.exits:
        print(f"  left out: {exits_in_words(model)}; a plain checkpoint is the last output's model", file=sys.stderr)
    print(f"{args.out}: {kind} with {model.plan.unrolled_layers} layers, {amount(size, 'B')}, from {describe(model)}")
    return 0
