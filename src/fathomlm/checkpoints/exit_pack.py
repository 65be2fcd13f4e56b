"""Exits as files of their own, an exit pack: what `train: exits` taught, without the model that it left as it was.

    exits.json         where the exits are, what each has of its own, and which base they belong to
    exits.safetensors  the exits' tensors, by the decoder's names, and the exit vocabulary, if it is not every token
    threshold.json     where there is one: the threshold that `fathomlm calibrate` learnt for them

A pack is put on any copy of its base. Nothing of the base changes, so its last output is what it was, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from fathomlm.checkpoints.assemble import Model, empty_beside, finish
from fathomlm.checkpoints.base_sample import OWN, BaseSample
from fathomlm.checkpoints.locate import EXITS, EXITS_RECORD, check_exits
from fathomlm.checkpoints.writing import THRESHOLD, check_room, whole_directory
from fathomlm.depth import Architecture, DepthPlan, ExitParts, Relaxation
from fathomlm.depth.bounds import BOUNDS
from fathomlm.errors import CheckpointError, FathomError, OptionError, is_int
from fathomlm.fields import Fields, shown
from fathomlm.jsonfile import read_object
from fathomlm.model.decoder import Decoder
from fathomlm.model.exits import check_exit_vocab, check_rising
from fathomlm.model.seq2seq import FathomModel

FORMAT, VERSION = "fathomlm-exits", 1
RECORD, WEIGHTS = EXITS_RECORD, "exits.safetensors"
KIND = EXITS
VOCAB = "exit_vocab"
"""The tokens that exits choose among: int32, rising. The record has their number, null for every token."""
FORMER_VOCAB = "words"
"""What packs called it before, the packaged one among them."""
SHAPE = (
    "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "tied_embeddings", "norm", "activation",
    "gated", "residual", "qk_norm", "qkv_bias", "o_bias", "mlp_bias", "positions", "relative_buckets", "cross",
    "memory_width",
)  # fmt: skip
"""What two copies of one base agree in. Other traits do not survive every format: GGUF knows fewer families, and rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseRecord:
    architecture: dict[str, Any]
    plan: dict[str, Any]
    relaxation: dict[str, Any] | None
    sample: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackRecord:
    """The contents of exits.json."""

    format: str = FORMAT
    version: int = VERSION
    exits: list[int]
    parts: ExitParts
    base: _BaseRecord
    exit_vocab: int | None = None
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPack:
    """A pack that was read and checked."""

    path: Path
    exits: tuple[int, ...]
    """The steps that they follow, from 0."""
    parts: ExitParts
    architecture: Architecture
    plan: DepthPlan
    """The base's, without exits."""
    relaxation: Relaxation | None
    sample: BaseSample
    tensors: dict[str, Tensor] = field(repr=False)
    exit_vocab: Tensor | None = field(default=None, repr=False)
    """The tokens that the exits choose among; None is every token."""

    def plan_over(self, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> DepthPlan:
        """The plan of a model with these exits; refused where the model is not of the base's shape."""
        if plan.exits or plan.draft:
            have = (
                f"exits already, after {', '.join(str(i + 1) for i in plan.exits)}"
                if plan.exits
                else "a draft layer already"
            )
            raise OptionError(f"the model has {have}; the exits in {self.path} are for one without")
        mine, theirs = _traits(self.architecture, self.plan, self.relaxation), _traits(architecture, plan, relaxation)
        for name, value in mine.items():
            if theirs[name] != value:
                raise OptionError(
                    f"the exits in {self.path} are for a model with {name} {value}, and this has {theirs[name]}"
                )
        return plan.with_exits(self.exits, layer=self.parts.layer, draft=self.parts.draft)


def write_pack(
    model: FathomModel,
    out: str | Path,
    *,
    force: bool = False,
    dtype: torch.dtype | None = None,
    threshold: Path | None = None,
    exit_vocab: Tensor | None = None,
) -> Path:
    """Write the exits of `model` into the directory `out`, and return it. `dtype` is by default the model's own;
    `threshold` is a file to copy that was calibrated for them; `exit_vocab` are the tokens that they choose among, by
    default those that `limit_exits` gave the model."""
    out = Path(out)
    check_has_exits(model.plan, "the model")
    tensors = {name: value.to(dtype=dtype or value.dtype) for name, value in _own(model.decoder).items()}
    for name in (name for name, value in tensors.items() if not bool(value.isfinite().all())):
        raise OptionError(f"'{name}' holds numbers that are not finite; such an exit is not worth keeping")
    if (chosen := _exit_vocab(model.decoder, exit_vocab)) is not None:
        tensors[VOCAB] = chosen
    sample = BaseSample.of(model.decoder)
    check_room(out, sum(value.numel() * value.element_size() for value in tensors.values()))
    with whole_directory(out, force, what=KIND, sign=RECORD) as directory:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        if threshold is not None:
            shutil.copyfile(threshold, directory / THRESHOLD)
        many = None if chosen is None else len(chosen)
        record = _PackRecord(
            exits=list(model.plan.exits),
            parts=model.config.exit_parts,
            base=_BaseRecord(
                architecture=model.architecture.to_dict(),
                plan=model.plan.with_exits(()).to_dict(),
                relaxation=None if model.relaxation is None else model.relaxation.to_dict(),
                sample=sample.to_dict(),
            ),
            exit_vocab=many,
            sha256=_digest((directory / WEIGHTS).read_bytes()),
        )
        text = json.dumps(dataclasses.asdict(record), indent=2)
        (directory / RECORD).write_text(text + "\n", encoding="utf-8")
    return out


def check_has_exits(plan: DepthPlan, who: str) -> None:
    """Refuse to make a pack of nothing."""
    if not plan.exits and not plan.draft:
        raise OptionError(f"{who} has no exits to write; `train: exits` in a recipe gives a model some")


def read_pack(path: str | Path) -> ExitPack:
    """A pack from its directory, every field and tensor checked. Nothing in it is executed."""
    path = Path(path).expanduser()
    check_exits(path)
    where = f"{path / RECORD}"
    fields = read_object(path / RECORD, error=CheckpointError)
    _check_version(fields, where)
    record = Fields(_renamed(fields.values), where, error=CheckpointError).build(_PackRecord)
    try:
        pack = _read(record, path, where)
        expected = _expected(pack, record.exit_vocab)
    except FathomError as error:
        raise error if str(error).startswith(where) else CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged ({type(error).__name__}: {error})") from error
    tensors = _read_tensors(path / WEIGHTS, record.sha256, expected)
    exit_vocab = tensors.pop(VOCAB, None)
    if exit_vocab is not None:
        try:
            check_rising(exit_vocab.tolist(), pack.architecture.vocab, f"{path / WEIGHTS}: '{VOCAB}'")
        except OptionError as error:
            raise CheckpointError(str(error)) from error
    return dataclasses.replace(pack, tensors=tensors, exit_vocab=exit_vocab)


@torch.no_grad()
def attach(model: Model, pack: ExitPack, *, any_base: bool = False) -> Model:
    """`model` with the exits of a pack. All else is the model's own tensors, not copies of them.

    Another base than the one that they were trained over is refused, unless `any_base` says that it may be: exits over a
    strange model are safe (full and speculative decoding keep its text) but say little, and that shows nowhere else.
    """
    plan = pack.plan_over(model.architecture, model.plan, model.relaxation)
    difference = None if any_base else pack.sample.difference(BaseSample.of(model.decoder))
    if difference is not None:
        raise OptionError(
            f"the exits in {pack.path} were trained over another model: {difference}. --any-base (any_base=True) puts them "
            "on all the same"
        )
    config = copy.deepcopy(model.config)
    config.plan = plan.to_dict()
    for name, value in _fields(pack.parts).items():
        setattr(config, name, value)
    config.exit_vocab = None if pack.exit_vocab is None else pack.exit_vocab.tolist()
    result = empty_beside(model, config)
    like = model.decoder.embed.weight
    own = {name: value.to(device=like.device, dtype=like.dtype) for name, value in pack.tensors.items()}
    result.decoder.load_state_dict(model.decoder.state_dict() | own, assign=True)
    return finish(result, model.tokenizer)


def _own(decoder: Decoder) -> dict[str, Tensor]:
    found = decoder.state_dict().items()
    return {name: value.detach().cpu().contiguous() for name, value in found if name.startswith(OWN)}


def _exit_vocab(decoder: Decoder, requested: Tensor | None) -> Tensor | None:
    """The tokens to store, in order: those that are given, else the decoder's."""
    tokens = decoder.exit_vocab.vocab_W if requested is None and decoder.exit_vocab is not None else requested
    if tokens is None:
        return None
    check_exit_vocab(tokens, decoder.architecture.vocab)
    return tokens.detach().to("cpu", torch.int32).sort().values


def _fields(parts: ExitParts) -> dict[str, Any]:
    """By the names of the configuration; whether exits have layers is the plan's."""
    return {"exit_rank": parts.head_rank, "exit_adapter": parts.adapter_rank, "exit_classifier": parts.classifier}


def _traits(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> dict[str, object]:
    traits: dict[str, object] = {name: getattr(architecture, name) for name in SHAPE}
    traits["recursions"] = plan.recursions
    traits["sharing"] = plan.sharing if plan.recursions > 1 else None
    traits |= {name: getattr(plan, name) for name in ("unrolled_layers", "kv", "kv_sharing", "kv_loops")}
    traits["routing"] = None if plan.routing is None else plan.routing.kind
    return traits | {"relaxation": None if relaxation is None else relaxation.to_dict()}


def _check_version(record: Fields, where: str) -> None:
    found, version = record.raw("format"), record.raw("version")
    if found != FORMAT:
        raise CheckpointError(f"{where} is not a {KIND}: its format is {shown(found)}, not '{FORMAT}'")
    if not is_int(version) or version != VERSION:
        raise CheckpointError(f"{where} has version {shown(version)}; this FathomLM reads version {VERSION}")


def _read(record: _PackRecord, path: Path, where: str) -> ExitPack:
    if bool(record.exits) == record.parts.draft:
        raise CheckpointError(f"{where}: exits must be a list of steps, from 0, and empty for a draft layer")
    if abs(record.exit_vocab or 0) > BOUNDS["vocab"][1]:
        raise CheckpointError(f"{where}: {VOCAB} must be a number of tokens, or null")
    base = record.base
    pack = ExitPack(
        path=path,
        exits=tuple(record.exits),
        parts=record.parts,
        architecture=Architecture.from_dict(base.architecture),
        plan=DepthPlan.from_dict(base.plan),
        relaxation=None if base.relaxation is None else Relaxation.from_dict(base.relaxation),
        sample=BaseSample.from_dict(base.sample, f"{where}, base, sample"),
        tensors={},
    )
    pack.plan_over(pack.architecture, pack.plan, pack.relaxation)  # refuses exits that the base has no place for
    return pack


def _expected(pack: ExitPack, exit_vocab: int | None) -> dict[str, torch.Size]:
    """The tensors that the record announces, by name and shape."""
    plan = pack.plan_over(pack.architecture, pack.plan, pack.relaxation)
    with torch.device("meta"):
        decoder = Decoder(pack.architecture, plan, pack.relaxation, **_fields(pack.parts))
    own = {name: value.shape for name, value in decoder.state_dict().items() if name.startswith(OWN)}
    return own if exit_vocab is None else own | {VOCAB: torch.Size((exit_vocab,))}


def _read_tensors(path: Path, digest: object, expected: dict[str, torch.Size]) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
        tensors: dict[str, Tensor] = _renamed(load(data))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt or truncated ({error})") from error
    if _digest(data) != digest:
        raise CheckpointError(f"{path} is not what was written: its checksum is not the one in {RECORD}; fetch it again")
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        kind = "is missing" if wrong[0] in expected else "has an unexpected tensor"
        raise CheckpointError(f"{path} {kind} '{wrong[0]}', according to {RECORD}")
    for name, shape in expected.items():
        value, wanted = tensors[name], "int32" if name == VOCAB else "floating numbers"
        fits = value.dtype == torch.int32 if name == VOCAB else value.is_floating_point()
        if value.shape != shape or not fits:
            found = f"{tuple(value.shape)} of {value.dtype}".replace("torch.", "")
            raise CheckpointError(f"{path}: '{name}' is {found}; {RECORD} asks for {tuple(shape)} of {wanted}")
    return tensors


def _renamed(named: Mapping[str, Any]) -> dict[str, Any]:
    return {VOCAB if name == FORMER_VOCAB else name: value for name, value in named.items()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
