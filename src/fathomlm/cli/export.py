"""`fathomlm export`: a model out as a Hugging Face checkpoint, as a GGUF file for llama.cpp, as a FathomLM directory that is
small on disk, or its exits alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import (
    SOURCE,
    ColumnOptions,
    DeviceOptions,
    DtypeOptions,
    ExitPackOptions,
    ForceOptions,
    JsonOptions,
    MeasuredDropOptions,
    texts_of,
    threshold_file,
)
from fathomlm.cli.display import progress_bar
from fathomlm.cli.first import check_model, check_text
from fathomlm.errors import OptionError
from fathomlm.options import like, option, section
from fathomlm.sizes import amount

if TYPE_CHECKING:
    import torch

    from fathomlm.model.seq2seq import FathomModel
    from fathomlm.train.data.sources import DataSource

GGUF_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""How a GGUF file calls data types."""
EXITS_ONLY = ("exits", "exit_vocab", "exit_vocab_from", "column")
"""Options of --format exits."""
SHARD = 4 * 10**9


@dataclass(frozen=True, kw_only=True)
class ExportDropOptions(MeasuredDropOptions):
    """What is left out of a model on its way."""

    device: str | None = like(
        DeviceOptions, "device", None, default_text="cpu", requires=("calibrate",),
        help="device of what --calibrate measures: cpu, cuda or cuda:N",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExitExportOptions(ExitPackOptions):
    """What --format exits takes."""

    exit_vocab: int | None = option(
        None, ge=1, help="exits choose among N tokens: the special ones and the most frequent in --exit-vocab-from"
    )
    exit_vocab_from: tuple[str, ...] | None = option(
        None, nargs="+", metavar="FILE", first=check_text,
        help="text, JSON Lines or Parquet similar to what the exits will be used on",
    )  # fmt: skip
    column: str | None = like(ColumnOptions, "column", None, default_text="text")


@dataclass(frozen=True, kw_only=True)
class Export(DtypeOptions, ForceOptions, JsonOptions):
    """Write MODEL in a format that other software reads. hf: a plain Hugging Face checkpoint in OUT, every step a layer of
    its own, LoRA and DoRA merged in; it is as large as the untied model. nanbeige: the same with the loops kept, for engines
    that know Nanbeige 4.2. gguf (or an OUT that ends in .gguf): one file for llama.cpp, with the loops kept where it has
    them. fathom: with its whole plan; --quantize int8 makes it a quarter of the float32 size. exits: only the weights of the
    model's exits, for --exits of `generate` and others."""

    model: str = option(positional=True, help=SOURCE, first=check_model)
    out: Path = option(positional=True, help="directory to write, or a file that ends in .gguf")
    format: Literal["hf", "nanbeige", "gguf", "fathom", "exits"] | None = option(
        None,
        help="plain and unrolled, looped as Nanbeige 4.2, for llama.cpp, with its plan, or the exits alone",
        default_text="hf, or gguf by the name of OUT",
    )
    quantize: Literal["int8", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"] | None = option(
        None,
        help="how to store matrices: int8 (with a scale per output channel) for --format fathom, others for --format gguf",
        default_text="as they are; in a GGUF file as --dtype, else f16",
    )
    unroll: bool = option(False, help="--format gguf: a layer for each step, for versions of llama.cpp without loops")
    max_shard_size: int | None = option(
        None, size=1000, help="split weights into files of at most this size, such as 12MB", default_text="4GB"
    )
    dropping: ExportDropOptions = section(ExportDropOptions, "dropped layers", skip=("column",))
    pack: ExitExportOptions = section(ExitExportOptions, "--format exits")

    def run(self) -> int:
        from fathomlm.checkpoints.writing import check_apart, check_target

        check_apart(self.model, self.out)
        format = self.format or ("gguf" if self.out.suffix == ".gguf" else "hf")
        if format == "exits":
            if self.dropping.drop is not None:
                raise OptionError("--drop cannot be combined with --format exits, which has no layers")
            return _exits(self)
        for name in EXITS_ONLY:
            if getattr(self.pack, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} requires --format exits")
        _check_quantize(self.quantize, format)
        if format == "gguf":
            return _gguf(self)
        if self.unroll:
            raise OptionError("--unroll requires --format gguf")
        check_target(self.out, self.force)

        model = _load(self)
        if format == "fathom":
            return _native(self, model, self.max_shard_size or SHARD)
        return _plain(self, model, self.max_shard_size or SHARD, None if format == "hf" else format)


def _load(options: Export) -> FathomModel:
    """The model, without the layers that are to be dropped."""
    from fathomlm.checkpoints.resolve import load

    if options.dropping.drop is None:
        if options.dropping.calibrate is not None:
            raise OptionError("--calibrate says which layers or neurons are kept; it requires --drop, which may be 0")
        return load(options.model, dtype=options.dtype)

    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.planned import check_conversion
    from fathomlm.checkpoints.resolve import open_source

    source = open_source(options.model)
    dropping = options.dropping
    if dropping.calibrate is not None and source.plan.plain:
        sizes = {name: getattr(dropping, name) for name in ("drop", "neurons", "repeat")}
        check_conversion(source.architecture, calibrated=True, **sizes)
    measured = dropping.measured(source, moments=dropping.neurons is not None, device=dropping.device or "cpu")
    fields: dict[str, Any] = {name: getattr(dropping, name) for name in ("drop", "by", "neurons", "repeat")}
    return convert(source, **fields, activations=measured, dtype=options.dtype)


def _origin(options: Export, model: FathomModel) -> str:
    """What was exported: the model's plan, or how many layers of it were kept."""
    from fathomlm.checkpoints.resolve import describe

    if options.dropping.drop is None or (kept := model.config.kept_layers) is None:
        return describe(model)
    own = len(set(kept))  # a repeated layer is there several times
    return f"{own} of {own + options.dropping.drop} layers"


def _check_quantize(kind: str | None, format: str) -> None:
    if kind is not None and format != (required := "fathom" if kind == "int8" else "gguf"):
        raise OptionError(f"--quantize {kind} requires --format {required}")


def _gguf(options: Export) -> int:
    from fathomlm.checkpoints.locate import is_gguf

    if options.max_shard_size is not None:
        raise OptionError("--max-shard-size cannot be combined with --format gguf, which is one file")
    if options.out.exists():
        replaceable = options.out.is_file() and is_gguf(options.out)
        if options.out.is_dir() or not options.force:
            raise OptionError(f"{options.out} exists; choose another name" + (", or --force" if replaceable else ""))
        if not replaceable:
            raise OptionError(f"{options.out} is not a GGUF file; --force will not delete it")

    from fathomlm.checkpoints.export import describe_exits
    from fathomlm.checkpoints.gguf.writer import export_gguf
    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.depth.cost import BLOCK

    model = decoder_only(_load(options), "--format gguf")
    kind = options.quantize or GGUF_KINDS.get(options.dtype or "", "f16")
    with progress_bar("exporting") as update:
        found = export_gguf(model, options.out, kind, unroll=options.unroll, on_layer=update)
    left_out = describe_exits(model) if model.plan.exits or model.plan.draft else None
    size = options.out.stat().st_size
    record = {
        "architecture": found.architecture,
        "layers": found.layers,
        "loops": found.loops,
        "bytes": size,
        "weights": kind,
        "in_16_bits": sorted(found.unpacked),
    }
    if options.json:
        print(json.dumps({"model": options.model, "out": str(options.out), **record, "left_out": left_out}))
        return 0
    if left_out is not None:
        print(f"  left out: {left_out}; the file is the last output's model", file=sys.stderr)
    if found.unpacked:
        rows = ", ".join(f"{length:,}" for length in sorted(set(found.unpacked.values())))
        which = f"  in f16, not {kind}: {', '.join(sorted(found.unpacked))}"
        print(f"{which}; rows of {rows} do not divide into blocks of {BLOCK}", file=sys.stderr)
    looped = f" looped {found.loops} times" if found.loops > 1 else ""
    layers = f"{found.layers} layers{looped}"
    print(f"{options.out}: {found.architecture}, {layers}, {kind}, {amount(size, 'B')}, from {_origin(options, model)}")
    return 0


def _plain(options: Export, model: FathomModel, limit: int, loops: str | None) -> int:
    from fathomlm.checkpoints.export import describe_exits, export, format_with_loops
    from fathomlm.checkpoints.families import FAMILIES, family_for
    from fathomlm.checkpoints.resolve import dtype_name

    loops = loops or format_with_loops(model)
    with progress_bar("exporting") as update:
        export(model, options.out, force=options.force, shard_bytes=limit, on_layer=update, loops=loops)
    kind = (FAMILIES[loops] if loops else family_for(model.architecture)).architecture_class
    exits = model.plan.exits or model.plan.draft
    left_out = describe_exits(model) if exits and not (loops and FAMILIES[loops].exit_gate) else None
    times = model.plan.recursions if loops else 1
    layers = model.plan.unique_layers if loops else model.plan.unrolled_layers
    size = _record(options, {"class": kind, "layers": layers, "loops": times}, {"left_out": left_out})
    if options.json:
        return 0
    if model.relaxation is not None and dtype_name(model) != "float32":
        print(
            f"  what each step adds was merged and rounded to {dtype_name(model)}; --dtype float32 keeps it exact",
            file=sys.stderr,
        )
    if left_out is not None:
        print(f"  left out: {left_out}; a plain checkpoint is the last output's model", file=sys.stderr)
    looped = f" looped {times} times" if times > 1 else ""
    print(f"{options.out}: {kind} with {layers} layers{looped}, {amount(size, 'B')}, from {_origin(options, model)}")
    return 0


def _native(options: Export, model: FathomModel, limit: int) -> int:
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.resolve import describe, dtype_name

    save(model, options.out, options.force, quantize=options.quantize, shard_bytes=limit)
    stored = options.quantize or dtype_name(model)
    files = len(list(options.out.glob("*.safetensors")))
    size = _record(options, {"class": type(model).__name__, "layers": model.plan.unrolled_layers}, {"weights": stored})
    if not options.json:
        split = "" if files == 1 else f" in {files} files of weights"
        print(f"{options.out}: {describe(model)}, {stored}, {amount(size, 'B')}{split}")
    return 0


def _exits(options: Export) -> int:
    from fathomlm.checkpoints.locate import EXITS, EXITS_RECORD
    from fathomlm.checkpoints.writing import check_target

    for name in ("quantize", "max_shard_size"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} cannot be combined with --format exits")
    pack, sources = options.pack.exits, _vocab_sources(options)
    check_target(options.out, options.force, what=EXITS, sign=EXITS_RECORD)

    from fathomlm.checkpoints.exit_pack import check_has_exits, write_pack
    from fathomlm.checkpoints.export import describe_exits
    from fathomlm.checkpoints.resolve import load, parse_dtype, plan_of

    check_has_exits(plan_of(options.model, pack), options.model)
    model = load(
        options.model,
        dtype=None if pack is None else "float32",
        exits=pack,
        any_base=options.pack.any_base,
    )
    if sources is not None:
        model.limit_exits(_frequent(options, model, sources, options.pack.exit_vocab or 1))
    threshold, other = _learnt(options, model)
    dtype = parse_dtype(options.dtype) or (model.decoder.embed.weight.dtype if pack is None else _stored(pack))
    write_pack(model, options.out, force=options.force, dtype=dtype, threshold=threshold)
    stored, exits = str(dtype).removeprefix("torch."), [index + 1 for index in model.plan.exits]
    limited = model.decoder.exit_vocab
    many = None if limited is None else len(limited.vocab_W)
    size = _record(options, {"exits": exits}, {"weights": stored, "threshold": threshold is not None, "exit_vocab": many})
    if options.json:
        return 0
    if other is not None:
        print(f"  left out: the threshold for layer {other}, where the model has no exit of its own", file=sys.stderr)
    if sources is not None and threshold is not None:
        print(
            "  the threshold was learnt without this exit vocabulary; `fathomlm calibrate` learns it anew", file=sys.stderr
        )
    among = "" if many is None else f", among {many:,} tokens"
    learnt = "" if threshold is None else ", and their threshold"
    print(f"{options.out}: {describe_exits(model)}{among}{learnt}, {stored}, {amount(size, 'B')}")
    return 0


def _stored(pack: Path) -> torch.dtype:
    """What a pack's weights are stored in, which they stay in when it is written anew."""
    import torch

    from fathomlm.checkpoints.exit_pack import read_pack

    return next((value.dtype for value in read_pack(pack).tensors.values()), torch.float32)


def _vocab_sources(options: Export) -> list[DataSource] | None:
    """The files to count tokens in, found before a model is loaded; None where exits are to choose as they did."""
    from fathomlm.train.data.sources import expand

    if options.pack.exit_vocab is None:
        for name in ("exit_vocab_from", "column"):
            if getattr(options.pack, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} requires --exit-vocab")
        return None
    if options.pack.exit_vocab_from is None:
        raise OptionError("--exit-vocab requires --exit-vocab-from, files to count tokens in")
    return expand(list(options.pack.exit_vocab_from))


def _frequent(options: Export, model: FathomModel, sources: Sequence[DataSource], most: int) -> torch.Tensor:
    from fathomlm.decode.prompts import end_tokens
    from fathomlm.train.data.frequent import frequent_tokens

    if model.tokenizer is None:
        raise OptionError(f"{options.model} has no tokenizer, so tokens cannot be counted")
    with progress_bar("counting tokens", unit="bytes") as update:
        texts = texts_of(sources, options.pack.column or "text", update)
        vocab, ends = model.architecture.vocab, end_tokens(model)
        return frequent_tokens(texts, model.tokenizer, most, vocab=vocab, always=ends)


def _learnt(options: Export, model: FathomModel) -> tuple[Path | None, int | None]:
    """The threshold beside the exits, in the model or the pack that is put on it, where it is for one of them; else the
    layer that it is for."""
    from fathomlm.decode.calibration import Calibration

    path = threshold_file(options.model, options.pack.exits)
    if not path.is_file():
        return None, None
    layer = Calibration.load(path).exit_layer
    return (path, None) if layer - 1 in model.plan.exits else (None, layer)


def _record(options: Export, what: dict[str, Any], more: dict[str, Any]) -> int:
    """Print the record where one is asked for, and give back the directory's size."""
    from fathomlm.checkpoints.native import directory_bytes

    size = directory_bytes(options.out)
    if options.json:
        print(json.dumps({"model": options.model, "out": str(options.out), **what, "bytes": size, **more}))
    return size
