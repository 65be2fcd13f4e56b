"""`fathomlm convert`: a plain model in, a (relaxed) recursive one out."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.tying import InitOptions
from fathomlm.cli.common import (
    SOURCE,
    DeviceOptions,
    DtypeOptions,
    ForceOptions,
    JsonOptions,
    MeasuredDropOptions,
    SeedOptions,
)
from fathomlm.cli.convert_vocab import VocabOptions, show_trimmed
from fathomlm.cli.display import log, progress_bar
from fathomlm.cli.first import check_model
from fathomlm.depth.options import PlanOptions, RelaxOptions, RoutingOptions
from fathomlm.depth.relaxation import RELAXATIONS
from fathomlm.errors import OptionError
from fathomlm.options import like, option, section
from fathomlm.sizes import amount


@dataclass(frozen=True, kw_only=True)
class StartOptions(InitOptions):
    """The same with ranks by size."""

    budget: float | None = option(
        None, gt=0, le=1, metavar="PART",
        help="lora, dora: choose ranks so that the result has at most this part of MODEL's bytes in the same number format",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Convert(ForceOptions, DtypeOptions, SeedOptions, JsonOptions):
    """Tie the layers of MODEL into one block that runs several times, optionally with a relaxation at each step (--relax),
    or leave layers out (--drop), or tokens (--vocab), and write the result to OUT, with a model card. The result needs
    uptraining; at full LoRA rank it computes what MODEL computes. With --router, tokens choose their own depth; a model that
    is recursive already keeps its weights and gets a router."""

    model: str = option(positional=True, help=SOURCE, first=check_model)
    out: Path = option(positional=True, help="directory to write")
    device: str = like(
        DeviceOptions, "device", help="device of the result and of what --calibrate measures: cpu, cuda or cuda:N"
    )
    plan: PlanOptions = section(PlanOptions, "depth plan")
    vocab: VocabOptions = section(VocabOptions, "vocabulary")
    dropping: MeasuredDropOptions = section(MeasuredDropOptions, "dropped layers and calibration")
    inits: StartOptions = section(StartOptions, "initialization")
    relaxation: RelaxOptions = section(RelaxOptions, "relaxation")
    routing: RoutingOptions = section(RoutingOptions, "routing")

    def run(self) -> int:
        from fathomlm.checkpoints.writing import check_apart, check_target

        check_apart(self.model, self.out)
        check_target(self.out, self.force)
        if self.vocab.vocab is not None:
            return self._trim(self.vocab.vocab)

        from fathomlm.checkpoints.card import Conversion, model_card
        from fathomlm.checkpoints.convert import convert
        from fathomlm.checkpoints.native import directory_bytes, save
        from fathomlm.checkpoints.planned import check_conversion
        from fathomlm.checkpoints.resolve import decoder_only, describe, dtype_name, open_source
        from fathomlm.train.uptraining import uptraining

        begin = time.perf_counter()
        fields = self._tying() | {"drop": self.dropping.drop, "by": self.dropping.by}
        fields |= {"neurons": self.dropping.neurons, "repeat": self.dropping.repeat}
        source = open_source(self.model)
        if self.dropping.calibrate is not None and source.plan.plain:
            shapes = {name: value for name, value in fields.items() if name != "by"}
            check_conversion(source.architecture, calibrated=True, **shapes)
        measured = self.dropping.measured(source, moments=self._reads_moments(), device=self.device)
        fields |= {"dtype": self.dtype, "device": self.device, "seed": self.seed, "activations": measured}
        with progress_bar("converting") as update:
            model = convert(source, on_layer=update, **fields)
        loss = None if measured is None else measured.loss_of(decoder_only(model, "--calibrate"))
        made = Conversion(name=self.model, base=source.architecture, model=model, activations=measured, start_loss=loss)
        command = shlex.join(["fathomlm", *sys.argv[1:]])
        save(model, self.out, self.force, card=model_card(made, self.out, command, uptraining(made, self.out)))
        seconds = time.perf_counter() - begin

        before, after = made.costs
        size, shares = directory_bytes(self.out), made.shares
        for warning in made.warnings:
            log(f"fathomlm: warning: {warning}")
        if self.json:
            record = {
                "model": self.model,
                "out": str(self.out),
                "plan": model.plan.to_dict(),
                "layout": model.plan.layout,
                "kept_layers": model.config.kept_layers,
                "neurons": model.architecture.intermediate,
                "router": None if model.plan.routing is None else model.plan.routing.kind,
                "relaxation": None if model.relaxation is None else model.relaxation.to_dict(),
                "dtype": dtype_name(model),
                "seed": self.seed,
                "non_embedding_parameters": after.non_embedding_parameters,
                "base_non_embedding_parameters": before.non_embedding_parameters,
                "embedding_parameters": after.embedding_parameters,
                "bytes": size,
                "bytes_share": round(shares[0], 4),
                "flops_share": round(shares[1], 4),
                "influence": None if measured is None else [round(each, 5) for each in measured.influence],
                "dropped_in_order": None if measured is None or not measured.order else list(measured.order),
                "base_loss": None if measured is None else round(measured.loss, 4),
                "start_loss": None if loss is None else round(loss, 4),
                "seconds": round(seconds, 3),
            }
            print(json.dumps(record))
            return 0
        share = after.non_embedding_parameters / before.non_embedding_parameters
        print(f"{self.out}: {describe(model)}, from {before.unrolled_layers} layers")
        print(
            f"  {amount(after.non_embedding_parameters)} parameters without embeddings "
            f"({share:.0%} of {amount(before.non_embedding_parameters)}), {amount(size, 'B')} on disk, {seconds:.1f} s"
        )
        print(f"  {shares[0]:.0%} of the base's bytes in the same number format, {shares[1]:.0%} of its FLOPs per token")
        if self.dropping.neurons is not None:
            print(f"  {model.architecture.intermediate:,} of {source.architecture.intermediate:,} neurons in each layer")
        if self.inits.budget is not None and model.relaxation is not None:
            print(f"  ranks: {', '.join(f'{name} {rank}' for name, rank in model.relaxation.ranks.items())}")
        if measured is not None:
            print(f"  loss {loss:.3f} over held-out calibration text, the base's {measured.loss:.3f}")
        if not model.plan.injection and (model.plan.recursions > 1 or self.dropping.drop or shares[0] < 1):
            what = "tied weights are" if model.plan.recursions > 1 else "what is left is"
            print(f"  {what} a starting point: uptrain the model before you judge its output ({self.out}/README.md)")
        return 0

    def _trim(self, size: int) -> int:
        """Leave out tokens, and nothing else."""
        others = self._tying() | asdict(self.dropping)
        for name in (name for name, value in others.items() if value not in (None, False)):
            raise OptionError(
                f"--vocab cannot be combined with --{name.replace('_', '-')}; trim the vocabulary first, then convert the "
                "result, which also teaches what is made of it"
            )
        from fathomlm.checkpoints.assemble import load_base
        from fathomlm.checkpoints.card import Conversion
        from fathomlm.checkpoints.native import save
        from fathomlm.checkpoints.resolve import parse_device, parse_dtype, plain_base

        begin = time.perf_counter()
        base = plain_base(self.model)
        kept = self.vocab.choose(base, size)
        model = load_base(kept.base, parse_dtype(self.dtype), parse_device(self.device), self.model)
        made = Conversion(name=self.model, base=base.architecture, model=model)
        save(model, self.out, self.force, card=kept.card(made, self.out, shlex.join(["fathomlm", *sys.argv[1:]])))
        return self.answer(kept.record(made, self.out, time.perf_counter() - begin), show_trimmed)

    def _tying(self) -> dict[str, Any]:
        """What is asked of layers, by the names of `convert`."""
        fields: dict[str, Any] = asdict(self.plan) | asdict(self.inits) | asdict(self.relaxation)
        return fields | {"router": self.routing.routing, "kv": self.routing.kv}

    def _reads_moments(self) -> bool:
        """Whether more than the layers' influence is to be measured."""
        relax = self.relaxation.relax
        narrower = self.dropping.neurons is not None
        return narrower or self.inits.init == "aligned" or (relax is not None and bool(RELAXATIONS[relax].relax_inits))
