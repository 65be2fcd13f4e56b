"""`fathomlm export`: a model out as a plain Hugging Face checkpoint, as a FathomLM directory that is small on disk, or its
exits alone."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import amount, layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument

if TYPE_CHECKING:
    from fathomlm.model.seq2seq import FathomModel

HELP = "write an unrolled plain Hugging Face checkpoint"
DESCRIPTION = (
    "Writes MODEL as a plain Hugging Face checkpoint in the directory OUT: every step a layer of its own, LoRA and DoRA "
    "merged in. It is as large as the untied model, and transformers and whatever else reads that format can serve it. "
    "With --format fathom the model stays as it is, plan and all; --quantize int8 makes its files a quarter of float32's. "
    "With --format exits only what the model's exits have of their own is written, for --exits of `generate` and others."
)
FORMATS = ("hf", "fathom", "exits")
SHARD = "4GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a FathomLM directory (or any other model source)")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; must not exist unless --force")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="hf, plain and unrolled (default), fathom, or exits")
    stored = "--format fathom: store matrices as int8 with a scale for each output channel; loading multiplies them out"
    parser.add_argument("--quantize", choices=("int8",), help=stored)
    parser.add_argument("--max-shard-size", metavar="SIZE", help=f"split files at this size, such as 12MB ({SHARD})")
    add_dtype_argument(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it is of the same kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.resolve import load
    from fathomlm.checkpoints.writing import check_target
    from fathomlm.errors import OptionError

    if args.format == "exits":
        return _exits(args)
    limit = parse_size(SHARD if args.max_shard_size is None else args.max_shard_size)
    if args.quantize is not None and args.format != "fathom":
        raise OptionError(
            "a plain Hugging Face checkpoint has no place for int8 weights; --quantize goes with --format fathom"
        )
    check_target(args.out, args.force)
    model = load(args.model, dtype=args.dtype)
    return (_plain if args.format == "hf" else _native)(args, model, limit)


def parse_size(text: str) -> int:
    """12MB, 4GB, 500KB or a number of bytes; a thousand each, as disks are sold."""
    from fathomlm.errors import OptionError

    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?B)?", text.strip(), re.IGNORECASE)
    size = 0 if found is None else round(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if size < 1:
        raise OptionError(f"--max-shard-size is a size such as 12MB or 4GB, not '{text}'")
    return size


def _plain(args: argparse.Namespace, model: FathomModel, limit: int) -> int:
    from fathomlm.checkpoints.export import exits_in_words, export
    from fathomlm.checkpoints.families import family_for
    from fathomlm.checkpoints.resolve import describe, dtype_name

    with layer_bar("exporting") as tick:
        export(model, args.out, force=args.force, shard_bytes=limit, on_layer=tick)
    kind = family_for(model.architecture).architecture_class
    left_out = exits_in_words(model) if model.plan.exits else None
    size = _record(args, {"class": kind, "layers": model.plan.unrolled_layers}, {"left_out": left_out})
    if args.json:
        return 0
    if model.relaxation is not None and dtype_name(model) != "float32":
        print(
            f"  what each step adds was merged and rounded to {dtype_name(model)}; --dtype float32 keeps it exact",
            file=sys.stderr,
        )
    if left_out is not None:
        print(f"  left out: {left_out}; a plain checkpoint is the last output's model", file=sys.stderr)
    print(f"{args.out}: {kind} with {model.plan.unrolled_layers} layers, {amount(size, 'B')}, from {describe(model)}")
    return 0


def _native(args: argparse.Namespace, model: FathomModel, limit: int) -> int:
    from fathomlm.checkpoints.resolve import describe, dtype_name
    from fathomlm.checkpoints.save import save

    save(model, args.out, args.force, quantize=args.quantize, shard_bytes=limit)
    stored = args.quantize or dtype_name(model)
    files = len(list(args.out.glob("*.safetensors")))
    size = _record(args, {"class": type(model).__name__, "layers": model.plan.unrolled_layers}, {"weights": stored})
    if not args.json:
        split = "" if files == 1 else f" in {files} files of weights"
        print(f"{args.out}: {describe(model)}, {stored}, {amount(size, 'B')}{split}")
    return 0


def _exits(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.exit_pack import KIND, RECORD, check_has_exits, write_pack
    from fathomlm.checkpoints.export import exits_in_words
    from fathomlm.checkpoints.resolve import dtype_name, load, parse_dtype, plan_of
    from fathomlm.checkpoints.writing import check_target
    from fathomlm.errors import OptionError

    for name in ("quantize", "max_shard_size"):
        if getattr(args, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} is for whole models; --format exits writes one small file")
    check_target(args.out, args.force, what=KIND, sign=RECORD)
    check_has_exits(plan_of(args.model), args.model)
    model = load(args.model)
    threshold, other = _learnt(args, model)
    write_pack(model, args.out, force=args.force, dtype=parse_dtype(args.dtype), threshold=threshold)
    stored, exits = args.dtype or dtype_name(model), [index + 1 for index in model.plan.exits]
    size = _record(args, {"exits": exits}, {"weights": stored, "threshold": threshold is not None})
    if args.json:
        return 0
    if other is not None:
        print(f"  left out: the threshold for layer {other}, where the model has no exit of its own", file=sys.stderr)
    learnt = "" if threshold is None else ", and their threshold"
    print(f"{args.out}: {exits_in_words(model)}{learnt}, {stored}, {amount(size, 'B')}")
    return 0


def _learnt(args: argparse.Namespace, model: FathomModel) -> tuple[Path | None, int | None]:
    """The threshold beside the model, where it is for one of its exits; else the layer that it is for."""
    from fathomlm.decode.calibration import FILE, Calibration

    path = Path(args.model).expanduser() / FILE
    if not path.is_file():
        return None, None
    layer = Calibration.load(path).exit_layer
    return (path, None) if layer - 1 in model.plan.exits else (None, layer)


def _record(args: argparse.Namespace, what: dict[str, Any], more: dict[str, Any]) -> int:
    """Print the record where one is asked for, and give back the directory's size."""
    from fathomlm.checkpoints.save import directory_bytes

    size = directory_bytes(args.out)
    if args.json:
        print(json.dumps({"model": args.model, "out": str(args.out), **what, "bytes": size, **more}))
    return size
