"""Options that many commands share: the model, the device, text to read, layers to measure over it, and the form of
the answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.checkpoints.tying import CALIBRATION_TOKENS
from fathomlm.checkpoints.writing import THRESHOLD
from fathomlm.cli.display import ProgressUpdate, progress_bar
from fathomlm.cli.first import check_device, check_model, check_pack, check_text, check_threads
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.dropping import DropOptions
from fathomlm.errors import DataError, OptionError
from fathomlm.options import ChecksFirst, like, option
from fathomlm.packaged import packaged_path
from fathomlm.train.data import PrepareOptions

if TYPE_CHECKING:
    from fathomlm.checkpoints.activations import Activations
    from fathomlm.checkpoints.assemble import BaseCheckpoint
    from fathomlm.model.hub import FathomForCausalLM
    from fathomlm.model.seq2seq import FathomModel
    from fathomlm.train.data.sources import DataSource


SOURCE = "preset, Hugging Face directory or hub id, GGUF file or FathomLM directory"
DTYPES = ("float32", "bfloat16", "float16")
CPU_FULL = re.compile(
    "can't allocate memory|not enough memory|Storage size calculation overflowed|integer multiplication overflow"
)


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """For commands that print tables or text."""

    json: bool = option(False, help="print one JSON object")

    def answer(self, record: dict[str, Any], show: Callable[[dict[str, Any]], object]) -> int:
        """Print a record where JSON is asked for; else show it to people."""
        if self.json:
            print(to_json(record))
        else:
            show(record)
        return 0


def to_json(record: dict[str, Any]) -> str:
    """One line that every JSON reader takes: numbers that are not finite become null."""
    from fathomlm.train.report import strict

    return json.dumps(strict(record), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class DtypeOptions:
    """For commands that read weights."""

    dtype: str | None = option(
        None, choices=DTYPES, help="data type of the weights", default_text="as stored; float32 for quantized GGUF files"
    )


@dataclass(frozen=True, kw_only=True)
class ThreadOptions:
    """For commands that compute on a CPU."""

    threads: int | None = option(None, ge=1, help="CPU threads", default_text="all", first=check_threads)

    def use_threads(self) -> None:
        """Checked again where they are used: a replica may run on another machine."""
        if self.threads is not None:
            import torch

            check_threads(self.threads)

            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(DtypeOptions, ThreadOptions):
    """For commands that run a model."""

    device: str = option("cpu", metavar="DEVICE", help="cpu, cuda or cuda:N", first=check_device)

    def load_source(
        self, model: str, *, exits: Path | None = None, any_base: bool = False, loops: int | None = None
    ) -> FathomModel:
        """A model, ready to run, with the exits of a pack where one is given."""
        self.use_threads()

        from fathomlm.checkpoints.resolve import load

        more = {"exits": exits, "any_base": any_base, "loops": loops}
        return load(model, self.dtype, self.device, quantize=self.quantized(model), **more)  # type: ignore[arg-type]

    def quantized(self, model: str) -> str | None:
        """What the weights are while they are computed with, where that is integers."""
        return None


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(DeviceOptions):
    """For commands that decode."""

    quantize: Literal["int8", "int4", "fp8", "none"] | None = option(
        None,
        help="compute with weights of fewer bits, int8 or int4 on a CPU, int8 or fp8 on a GPU: faster where few sequences "
        "run at once, and slightly less exact",
        default_text="int8 for models that ship with FathomLM, otherwise none",
    )

    def __post_init__(self) -> None:
        if self.quantize in (None, "none"):
            return
        where = self.device.partition(":")[0]
        if (only := {"int4": "cpu", "fp8": "cuda"}.get(self.quantize)) not in (None, where):
            raise OptionError(f"--quantize {self.quantize} requires --device {only}, got '{self.device}'")
        if where == "cpu" and self.dtype not in (None, "float32"):
            raise OptionError(f"--quantize {self.quantize} requires --dtype float32 on a CPU, got '{self.dtype}'")

    def quantized(self, model: str) -> str | None:
        """A packaged model is stored as int8 and loses nothing."""
        if self.quantize is not None:
            return None if self.quantize == "none" else self.quantize
        plain = self.device == "cpu" and self.dtype in (None, "float32")
        if not plain or Path(model).expanduser().exists() or packaged_path(model) is None:
            return None
        from fathomlm.kernels.cpu_library import compiler

        return "int8" if compiler() is not None else None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    """For commands that run one model."""

    model: str = option(positional=True, help=SOURCE, first=check_model)
    loops: int | None = option(
        None, ge=1, metavar="N", default_text="as the model says",
        help="looped models: run the core N times; Huginn and recurrent retrofits were trained for any number",
    )  # fmt: skip

    def load_any(self, *, exits: Path | None = None, any_base: bool = False) -> FathomModel:
        return self.load_source(self.model, exits=exits, any_base=any_base, loops=self.loops)

    def load(self, *, exits: Path | None = None, any_base: bool = False) -> FathomForCausalLM:
        """The same where only decoder-only models will do."""
        from fathomlm.checkpoints.resolve import decoder_only

        return decoder_only(self.load_any(exits=exits, any_base=any_base), "this command")


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """For commands that read text from tables."""

    column: str = like(PrepareOptions, "column", help="field with the text in JSON Lines and Parquet")


@dataclass(frozen=True, kw_only=True)
class TextOptions(ColumnOptions, ChecksFirst):
    """For commands that read documents."""

    data: tuple[str, ...] = option(
        metavar="FILE", first=check_text,
        help="text (.txt, .md), JSON Lines (.jsonl, also .gz, .xz, .zst) or Parquet; repeatable",
    )  # fmt: skip

    def check_first(self) -> None:
        """Files without text, or without the column, are refused at once; the hub and a corpus are read later."""
        from fathomlm.train.data.sources import expand

        if not self.data:
            return
        corpora = any((Path(source).expanduser() / "corpus.json").is_file() for source in self.data)
        if not corpora and all(source.kind != "hub" for source in expand(self.data)):
            read_documents(self.data, self.column, 1)


@dataclass(frozen=True, kw_only=True)
class ForceOptions:
    """For commands that write a directory."""

    force: bool = like(PrepareOptions, "force", help="replace the output directory if it is of the same kind")


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    seed: int = like(Sampling, "seed", 0, help="random seed")


@dataclass(frozen=True, kw_only=True)
class ExitPackOptions:
    """Exits in a directory of their own."""

    exits: Path | None = option(
        None, metavar="DIR", first=check_pack, help="add trained exits to MODEL, from `fathomlm export --format exits`"
    )
    any_base: bool = option(False, help="accept --exits that were trained over another model")

    def __post_init__(self) -> None:
        if self.any_base and self.exits is None:
            raise OptionError("--any-base requires --exits")


def check_input() -> None:
    """Refuse to read a standard input that was closed (`<&-`)."""
    if sys.stdin is None:
        raise OptionError("standard input is closed")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put in front
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error


def read_documents(data: Sequence[str], column: str, limit: int | None = None, *, empty: bool = False) -> list[str]:
    """The first documents of some sources, or all; `empty` keeps those without text."""
    from fathomlm.train.data.sources import expand, read

    documents = chain.from_iterable(read(source, (column,)) for source in expand(data))
    texts = (document.fields[0] for document in documents)
    found = list(islice(texts if empty else filter(str.strip, texts), limit))
    if not any(text.strip() for text in found):
        raise DataError(f"{', '.join(data)} has no text")
    return found


def texts_of(sources: Sequence[DataSource], column: str, update: ProgressUpdate) -> Iterator[str]:
    """The documents of some sources, told by the bytes that were read."""
    from fathomlm.train.data.sources import read

    sizes = [source.bytes or 0 for source in sources]
    for number, source in enumerate(sources):
        for document in read(source, (column,)):
            update(sum(sizes[:number]) + document.position, sum(sizes))
            yield document.fields[0]


def threshold_file(model: str, exits: Path | None) -> Path:
    """Where a calibrated threshold is kept: with the exits that it was calibrated for."""
    return Path(model if exits is None else exits).expanduser() / THRESHOLD


@contextmanager
def memory_errors(lower: str) -> Iterator[None]:
    """Too much for the device is a mistake of the settings: `lower` names what to lower."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:  # a GPU's has a type of its own, a CPU's is known by its words
        message = (str(error).splitlines() or [""])[0]
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not CPU_FULL.search(message):
            raise
        why = message.rpartition("DefaultCPUAllocator: ")[2]
        raise OptionError(f"the device has too little memory for this; lower {lower} ({why})") from error


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Text over which a plain model's activations are measured."""

    calibrate: tuple[str, ...] | None = option(
        None, metavar="FILE", first=check_text,
        help="measure layers over this text: .txt, .md, JSON Lines (also .gz, .xz, .zst) or Parquet; repeatable",
    )  # fmt: skip
    calibrate_tokens: int | None = option(
        None, ge=2, help="tokens of it to read", default_text=f"{CALIBRATION_TOKENS:,}", requires=("calibrate",)
    )
    column: str | None = like(ColumnOptions, "column", None, default_text="text", requires=("calibrate",))

    def measured(
        self, source: FathomModel | BaseCheckpoint, *, moments: bool = True, device: str = "cpu"
    ) -> Activations | None:
        """What `measure_activations` finds, with a progress bar; None without text."""
        if self.calibrate is None:
            return None
        from fathomlm.checkpoints.activations import measure_activations
        from fathomlm.train.data.sources import expand, read

        documents = (document for each in expand(list(self.calibrate)) for document in read(each, (self.column or "text",)))
        texts = (document.fields[0] for document in documents)
        tokens = self.calibrate_tokens or CALIBRATION_TOKENS
        with progress_bar("calibrating") as update:
            return measure_activations(
                source, texts, tokens=tokens, moments=moments, greedy=self.searched, device=device, on_layer=update
            )

    @property
    def searched(self) -> int:
        """How many layers a greedy search is to leave out."""
        return 0


@dataclass(frozen=True, kw_only=True)
class MeasuredDropOptions(DropOptions, CalibrateOptions):
    """Which layers are left out, also by what was measured."""

    @property
    def searched(self) -> int:
        return (self.drop or 0) if self.by == "greedy" else 0
