"""`fathomlm eval frontier MODEL... --data FILE --sweep HOW`: quality against measured latency and FLOPs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import (
    SOURCE,
    ColumnOptions,
    DeviceOptions,
    ForceOptions,
    JsonOptions,
    read_documents,
    threshold_file,
)
from fathomlm.cli.decoding import ReferenceOptions, ShippedExitOptions, lift_exit_vocab, tell_shipped
from fathomlm.cli.first import check_file, check_model
from fathomlm.cli.progress import progress_bar
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_common import PromptOptions, print_record
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.frontier import DecodedSweep, SweepSetting, TradeOffCurve
    from fathomlm.lab.evaluate.samples import PromptForm, Sample
    from fathomlm.model.seq2seq import FathomModel

QUALITIES = {
    "agreement": "agreement with the full model (fraction of tokens)",
    "ppl": "perplexity",
    "rouge": "ROUGE-L (points)",
    "bleu": "BLEU (points)",
    "squad": "SQuAD F1 (points)",
    "number": "exact match (points)",
}
SWEPT = ("sweep", "threshold")


@dataclass(frozen=True, kw_only=True)
class Frontier(ForceOptions, JsonOptions, ColumnOptions, DeviceOptions, ReferenceOptions, ShippedExitOptions, PromptOptions):
    """Run each MODEL at many depths and draw quality against cost: time per token, measured here by decoding, and FLOPs. The
    quality is agreement with the full model, perplexity, or a metric of completions with references. A threshold sweep marks
    the calibrated threshold. The area under the curve sums a sweep up."""

    models: tuple[str, ...] = option(
        positional=True, metavar="MODEL", first=check_model, help=f"{SOURCE}; several on one picture"
    )
    data: Path = option(metavar="FILE", first=check_file, help="text or JSON Lines; with references for rouge and others")
    sweep: Literal["threshold", "depth", "exit-layer"] = option(help="what is varied; depth is the number of recursions")
    quality: str = option("agreement", choices=tuple(QUALITIES), help="what is measured")
    max_new_tokens: int = like(Sampling, "max_new_tokens", 32, ge=2)
    repeats: int = option(2, ge=1, help="how often each prompt is timed; the fastest counts")
    exit_layer: str | None = like(
        Exiting, "exit_layers", default_text="the model's own, or all",
        help="threshold: the exit; exit-layer: recursion, layer, or layers such as 4,8",
    )  # fmt: skip
    thresholds: tuple[float, ...] | None = option(
        None, ge=0, le=1, metavar="T,...", default_text="0,0.1,...,1", requires=SWEPT, help="threshold: which to try"
    )
    mode: str | None = like(
        Exiting, "mode", None, choices=("parallel", "state-copy", "speculative"), default_text="parallel",
        requires=SWEPT, help="threshold: what happens at an exit",
    )  # fmt: skip
    min_exit_layer: int | None = like(
        Exiting, "min_exit_layer", help="state-copy: every layer from N on is an exit", requires=SWEPT
    )
    confidence: str | None = like(Exiting, "confidence", requires=SWEPT)
    decay: float | None = like(Exiting, "decay", requires=SWEPT)
    out: Path = option(Path("analysis/frontier"), metavar="DIR", help="directory to write")

    def run(self) -> int:
        pack = _check(self)

        from fathomlm.checkpoints.writing import whole_directory
        from fathomlm.lab.analyze.report import check_directory
        from fathomlm.lab.drawing import check_matplotlib
        from fathomlm.lab.evaluate.frontier_report import draw_frontier, point_table, summary_table
        from fathomlm.train.report import strict

        check_matplotlib()
        check_directory(self.out, "frontier", self.force)
        settings = {name: _settings(self, pack, name) for name in self.models}  # refuses before weights are loaded
        form = _form(self)
        documents = read_documents([str(self.data)], self.column, self.prompts) if form is None else []
        curves: list[TradeOffCurve] = []
        reference: DecodedSweep | None = None
        for name in self.models:
            curve, full = _measure(self, pack, name, settings[name], documents, form, reference)
            reference = reference or full
            curves.append(curve)
        table = summary_table(curves)
        record = _record(self, pack, curves)
        with whole_directory(self.out, self.force, what="frontier analysis", sign="frontier.json") as place:
            picture: dict[str, Any] = {
                "sweep": self.sweep,
                "quality": QUALITIES[self.quality],
                "lower": self.quality == "ppl",
            }
            draw_frontier(curves, table, place / "frontier.png", **picture)
            text = json.dumps(strict(record), ensure_ascii=False, allow_nan=False)
            (place / "frontier.json").write_text(text + "\n", encoding="utf-8")
        if self.json:
            print_record(record)
            return 0
        for curve in curves:
            print_table(point_table(curve, self.quality), f"{curve.model}: {curve.plan}")
        print_table(table)
        for curve in curves:
            if curve.kept is not None:
                print(f"{curve.model}: {curve.kept.name} keeps 99% of the full model's score")
        print(f"wrote {self.out / 'frontier.png'} and {self.out / 'frontier.json'}")
        return 0


def _check(options: Frontier) -> Path | None:
    """Refuse what cannot be swept; gives back the pack of exits that is used."""
    if len(set(options.models)) < len(options.models):
        raise OptionError("duplicate MODEL")
    exiting = options.sweep == "threshold" and len(options.models) == 1
    placed = options.exit_layer is not None or options.min_exit_layer is not None
    pack = options.pack(options.models[0], options.mode or "parallel" if exiting else None, placed=placed, exits_only=True)
    if pack is not None and len(options.models) > 1:
        raise OptionError(f"--exits belong to one MODEL, got {len(options.models)}")
    if pack is not None and options.exits is None:
        tell_shipped(options.models[0])
    return pack


def _settings(options: Frontier, pack: Path | None, name: str) -> tuple[SweepSetting, ...]:
    from fathomlm.checkpoints.resolve import encoder_of, plan_of
    from fathomlm.lab.evaluate.frontier import THRESHOLDS, sweep_settings, threshold_settings

    plan = plan_of(name, pack)
    if options.quality == "ppl" and encoder_of(name) is not None:
        raise OptionError(f"perplexity is for decoder-only models; {name} is an encoder-decoder")
    if options.sweep != "threshold":
        return sweep_settings(plan, options.sweep, options.exit_layer)
    return threshold_settings(
        plan,
        options.thresholds or THRESHOLDS,
        mode=options.mode or "parallel",
        exit_layer=_one_layer(options),
        confidence=options.confidence,
        min_exit_layer=options.min_exit_layer,
        decay=options.decay,
    )


def _one_layer(options: Frontier) -> int | None:
    if options.exit_layer is None:
        return None
    if not options.exit_layer.isdecimal():
        raise OptionError(f"--exit-layer takes one layer in a threshold sweep, from 1; got '{options.exit_layer}'")
    return int(options.exit_layer)


def _form(options: Frontier) -> PromptForm | None:
    """How rows with references are read; None where the data are text."""
    if options.quality in ("agreement", "ppl"):
        return None
    from fathomlm.lab.evaluate.metrics import find_metric
    from fathomlm.lab.evaluate.samples import choose_form

    find_metric(options.quality)
    return choose_form(options.data, source=None, prompt=None, reference=None, metric=options.quality, shots=None)


def _measure(
    options: Frontier,
    pack: Path | None,
    name: str,
    settings: tuple[SweepSetting, ...],
    documents: Sequence[str],
    form: PromptForm | None,
    reference: DecodedSweep | None,
) -> tuple[TradeOffCurve, DecodedSweep]:
    from fathomlm.checkpoints.resolve import describe
    from fathomlm.cli.display import model_name
    from fathomlm.decode.sampling import Sampling
    from fathomlm.lab.evaluate.frontier import build_curve, decode_settings

    model = options.load_source(name, exits=pack, any_base=options.any_base)
    samples, prompts = _prompts(options, model, documents, form)
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, ignore_eos=form is None, stop=() if form is None else form.stop
    )
    several = options.min_exit_layer is not None or options.decay is not None
    if options.sweep == "threshold" and not several:  # a threshold is learnt for one exit, and to be held
        settings = (*settings, _adaptive(options, threshold_file(name, pack), model, prompts, settings))
    with progress_bar(f"decoding {model_name(name)}", unit="prompts") as update:
        decoded = decode_settings(
            model, prompts, sampling, settings, repeats=options.repeats, reference=options.reference, on_done=update
        )
    qualities = _qualities(options, model, settings, decoded, documents, samples)
    full = next(each for setting, each in zip(settings, decoded, strict=True) if setting.kind == "full")
    curve = build_curve(model_name(name), describe(model), settings, decoded, qualities, reference or full)
    return curve, full


def _prompts(
    options: Frontier, model: FathomModel, documents: Sequence[str], form: PromptForm | None
) -> tuple[list[Sample], list[list[int]]]:
    from fathomlm.decode.prompts import encode_prompt
    from fathomlm.lab.evaluate.generation import cut_prompt
    from fathomlm.lab.evaluate.samples import read_samples
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM

    encoder = isinstance(model, FathomForSeq2SeqLM)
    room = model.architecture.context - (0 if encoder else options.max_new_tokens)
    if room < 1:
        raise OptionError(f"--max-new-tokens must be < the model's context of {model.architecture.context:,}")
    if form is None:
        return [], _beginnings(
            [encode_prompt(model, text) for text in documents], min(options.prompt_tokens, room), options.prompts
        )
    samples = read_samples(options.data, form, limit=options.prompts, alone=encoder)
    return samples, [cut_prompt(model, encode_prompt(model, sample.prompt), room) for sample in samples]


def _beginnings(documents: Sequence[list[int]], size: int, many: int) -> list[list[int]]:
    """The beginning of each document; where there are fewer documents than prompts, later parts of them too."""
    parts = [[tokens[at : at + size] for at in range(0, max(1, len(tokens) - size + 1), size)] for tokens in documents]
    turns = max(len(each) for each in parts)
    return [each[turn] for turn in range(turns) for each in parts if turn < len(each)][:many]


def _adaptive(
    options: Frontier, path: Path, model: FathomModel, prompts: Sequence[list[int]], settings: Sequence[SweepSetting]
) -> SweepSetting:
    """The threshold that was learnt for this exit: beside it, or now, from the same prompts."""
    from fathomlm.decode.calibration import Calibration, calibrate
    from fathomlm.decode.sampling import Sampling
    from fathomlm.lab.evaluate.frontier import at_threshold

    exiting = settings[0].exiting
    assert exiting is not None
    (exit, *others) = exiting.exits(model.plan)
    if others:
        raise OptionError(f"this sweep has one exit, and the model has {len(others) + 1}; name one with --exit-layer")
    found = Calibration.load(path) if path.is_file() else None
    if found is None or (found.exit_layer, found.confidence) != (exit + 1, exiting.confidence):
        sampling = Sampling(max_new_tokens=options.max_new_tokens, ignore_eos=True)
        found = calibrate(model, prompts, sampling, exit_layer=exit + 1, confidence=exiting.confidence)
    return at_threshold(found.estimator.threshold, exiting.mode, exit + 1, exiting.confidence, kind="adaptive")


def _qualities(
    options: Frontier,
    model: FathomModel,
    settings: Sequence[SweepSetting],
    decoded: Sequence[DecodedSweep],
    documents: Sequence[str],
    samples: Sequence[Sample],
) -> list[tuple[float, float]]:
    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.lab.evaluate.frontier_quality import agreement, perplexities, text_metric
    from fathomlm.lab.evaluate.metrics import find_metric

    if options.quality == "agreement":
        return [agreement(model, each.results) for each in decoded]
    if options.quality == "ppl":
        lift_exit_vocab(model)
        with progress_bar("predicting", unit="windows") as update:
            return perplexities(decoder_only(model, "perplexity"), settings, documents, on_done=update)
    metric = find_metric(options.quality)
    return [text_metric(options.quality, metric, samples, each.results) for each in decoded]


def _record(options: Frontier, pack: Path | None, curves: Sequence[TradeOffCurve]) -> dict[str, Any]:
    from fathomlm import __version__

    names = ("sweep", "quality", "prompt_tokens", "max_new_tokens", "repeats", "exit_layer", "device")
    record: dict[str, Any] = {
        "kind": "frontier",
        "version": __version__,
        "data": str(options.data),
        "models": list(options.models),
    }
    record |= {"texts": options.prompts} | {name: getattr(options, name) for name in names}
    record["exit_pack"] = None if pack is None else str(pack)
    if options.sweep == "threshold":
        record["decode"] = options.mode or "parallel"
    curves_shown = [curve.to_dict() for curve in curves]
    return record | {"curves": curves_shown, "files": [str(options.out / f"frontier.{kind}") for kind in ("json", "png")]}
