"""`fathomlm export`: a model out as a plain Hugging Face checkpoint, as a FathomLM directory that is small on disk, or its
exits alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.exit_options import add_pack_arguments, learnt_place, pack_options
from fathomlm.cli.progress import Tick, amount, layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument
from fathomlm.sizes import parse_size

if TYPE_CHECKING:
    import torch

    from fathomlm.model.seq2seq import FathomModel
    from fathomlm.train.data.sources import DataSource

HELP = "write an unrolled plain Hugging Face checkpoint"
DESCRIPTION = (
    "Writes MODEL as a plain Hugging Face checkpoint in the directory OUT: every step a layer of its own, LoRA and DoRA "
    "merged in. It is as large as the untied model, and transformers and whatever else reads that format can serve it. "
    "With --format fathom the model stays as it is, plan and all; --quantize int8 makes its files a quarter of float32's. "
    "With --format exits only what the model's exits have of their own is written, for --exits of `generate` and others."
)
EXITS_ONLY = ("exits", "exit_vocab", "exit_vocab_from", "column")
"""Options of --format exits."""
FORMATS = ("hf", "fathom", "exits")
SHARD = "4GB"


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
    _add_exits_arguments(parser)


def _add_exits_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("--format exits").add_argument
    few = "let the exits choose among N tokens: the special ones, and the most frequent in --exit-vocab-from"
    add("--exit-vocab", metavar="N", type=int, help=few)
    add("--exit-vocab-from", metavar="FILE", nargs="+", help="text, JSON lines or Parquet: what the exits will be used for")
    add("--column", metavar="NAME", help="where the text is in JSON lines and Parquet (text)")
    add_pack_arguments(add)


def run(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.resolve import load
    from fathomlm.checkpoints.writing import check_target
    from fathomlm.errors import OptionError

    if args.format == "exits":
        return _exits(args)
    for name in EXITS_ONLY:
        if getattr(args, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} goes with --format exits")
    pack_options(args)
    limit = parse_size(SHARD if args.max_shard_size is None else args.max_shard_size, "--max-shard-size", least=1000)
    if args.quantize is not None and args.format != "fathom":
        raise OptionError(
            "a plain Hugging Face checkpoint has no place for int8 weights; --quantize goes with --format fathom"
        )
    check_target(args.out, args.force)
    model = load(args.model, dtype=args.dtype)
    return (_plain if args.format == "hf" else _native)(args, model, limit)


def _plain(args: argparse.Namespace, model: FathomModel, limit: int) -> int:
    from fathomlm.checkpoints.export import describe_exits, export
    from fathomlm.checkpoints.families import family_for
    from fathomlm.checkpoints.resolve import describe, dtype_name

    with layer_bar("exporting") as tick:
        export(model, args.out, force=args.force, shard_bytes=limit, on_layer=tick)
    kind = family_for(model.architecture).architecture_class
    left_out = describe_exits(model) if model.plan.exits else None
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
    from fathomlm.checkpoints.export import describe_exits
    from fathomlm.checkpoints.resolve import load, parse_dtype, plan_of
    from fathomlm.checkpoints.writing import check_target
    from fathomlm.errors import OptionError

    for name in ("quantize", "max_shard_size"):
        if getattr(args, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} is for whole models; --format exits writes one small file")
    pack, sources = pack_options(args), _vocab_sources(args)
    check_target(args.out, args.force, what=KIND, sign=RECORD)
    check_has_exits(plan_of(args.model, args.exits), args.model)
    model = load(args.model, dtype=None if args.exits is None else "float32", **pack)
    if sources is not None:
        model.limit_exits(_frequent(args, model, sources))
    threshold, other = _learnt(args, model)
    dtype = parse_dtype(args.dtype) or (model.decoder.embed.weight.dtype if args.exits is None else _stored(args.exits))
    write_pack(model, args.out, force=args.force, dtype=dtype, threshold=threshold)
    stored, exits = str(dtype).removeprefix("torch."), [index + 1 for index in model.plan.exits]
    limited = model.decoder.exit_vocab
    many = None if limited is None else len(limited.vocab_W)
    size = _record(args, {"exits": exits}, {"weights": stored, "threshold": threshold is not None, "exit_vocab": many})
    if args.json:
        return 0
    if other is not None:
        print(f"  left out: the threshold for layer {other}, where the model has no exit of its own", file=sys.stderr)
    if sources is not None and threshold is not None:
        print(
            "  the threshold was learnt without this exit vocabulary; `fathomlm calibrate` learns it anew", file=sys.stderr
        )
    among = "" if many is None else f", among {many:,} tokens"
    learnt = "" if threshold is None else ", and their threshold"
    print(f"{args.out}: {describe_exits(model)}{among}{learnt}, {stored}, {amount(size, 'B')}")
    return 0


def _stored(pack: Path) -> torch.dtype:
    """What a pack's weights are stored in, which they stay in when it is written anew."""
    import torch

    from fathomlm.checkpoints.exit_pack import read_pack

    return next((value.dtype for value in read_pack(pack).tensors.values()), torch.float32)


def _vocab_sources(args: argparse.Namespace) -> list[DataSource] | None:
    """The files to count tokens in, found before a model is loaded; None where exits are to choose as they did."""
    from fathomlm.errors import OptionError
    from fathomlm.train.data.sources import expand

    if args.exit_vocab is None:
        for name in ("exit_vocab_from", "column"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} requires --exit-vocab")
        return None
    if args.exit_vocab < 1:
        raise OptionError(f"--exit-vocab must be >= 1, got {args.exit_vocab}")
    if args.exit_vocab_from is None:
        raise OptionError("--exit-vocab requires --exit-vocab-from, files to count tokens in")
    return expand(args.exit_vocab_from)


def _frequent(args: argparse.Namespace, model: FathomModel, sources: Sequence[DataSource]) -> torch.Tensor:
    from fathomlm.decode.prompts import end_tokens
    from fathomlm.errors import OptionError
    from fathomlm.train.data.frequent import frequent_tokens

    if model.tokenizer is None:
        raise OptionError(f"{args.model} has no tokenizer, so tokens cannot be counted")
    with layer_bar("counting tokens", unit="bytes") as tick:
        texts = _texts(sources, args.column or "text", tick)
        vocab, ends = model.architecture.vocab, end_tokens(model)
        return frequent_tokens(texts, model.tokenizer, args.exit_vocab, vocab=vocab, always=ends)


def _texts(sources: Sequence[DataSource], column: str, tick: Tick) -> Iterator[str]:
    from fathomlm.train.data.sources import read

    sizes = [source.bytes or 0 for source in sources]
    for number, source in enumerate(sources):
        for document in read(source, (column,)):
            tick(sum(sizes[:number]) + document.position, sum(sizes))
            yield document.fields[0]


def _learnt(args: argparse.Namespace, model: FathomModel) -> tuple[Path | None, int | None]:
    """The threshold beside the exits, in the model or the pack that is put on it, where it is for one of them; else the
    layer that it is for."""
    from fathomlm.decode.calibration import FILE, Calibration

    path = learnt_place(args) / FILE
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
