"""`fathomlm eval frontier MODEL... --data FILE --sweep HOW`: quality against measured latency and FLOPs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.exit_options import (
    add_pack_arguments,
    learnt_place,
    lift_exit_vocab,
    pack_options,
    settle_pack,
    tell_shipped,
)
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument, load_any_model
from fathomlm.errors import DataError, OptionError, choices
from fathomlm.lab.cli.eval_options import check_least, print_record
from fathomlm.lab.tables import print_table

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.frontier import DecodedSweep, SweepSetting, TradeOffCurve
    from fathomlm.lab.evaluate.samples import PromptForm, Sample
    from fathomlm.model.seq2seq import FathomModel

HELP = "quality against latency and FLOPs, over thresholds, depths or exit layers"
DESCRIPTION = (
    "Runs each MODEL at many depths and draws what it is worth against what it costs: time per token, measured here by "
    "decoding, and FLOPs. The quality is agreement with the whole model, perplexity, or a metric of texts with references. "
    "A threshold sweep marks the threshold that the model finds by itself. The area under the curve sums a sweep up."
)
QUALITIES = {
    "agreement": "agreement with the whole model (part of the tokens)",
    "ppl": "perplexity",
    "rouge": "ROUGE-L (points)",
    "bleu": "BLEU (points)",
    "squad": "SQuAD F1 (points)",
    "number": "exact match (points)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="presets, directories, hub ids or GGUF files, all on one picture")
    add("--data", metavar="FILE", type=Path, required=True, help="text or JSON lines; with references for rouge and others")
    add("--sweep", metavar="HOW", required=True, help="threshold, depth (recursions) or exit-layer")
    add("--quality", metavar="Q", default="agreement", help=f"{', '.join(QUALITIES)} (agreement)")
    add("--column", metavar="NAME", default="text", help="where the text is in JSON lines (text)")
    add("--texts", metavar="N", type=int, default=8, help="documents or rows to use (8)")
    add("--prompt-tokens", metavar="N", type=int, default=32, help="tokens of each document that are the prompt (32)")
    add("--max-new-tokens", metavar="N", type=int, default=32, help="length of each text (32)")
    add("--repeats", metavar="N", type=int, default=2, help="how often each text is timed; the fastest counts (2)")
    where = "threshold: the exit; exit-layer: recursion, layer, or layers such as 4,8 (the model's own, or all)"
    add("--exit-layer", metavar="N", help=where)
    add("--thresholds", metavar="T,T", help="threshold: which to try (0,0.1,...,1)")
    add("--decode", metavar="MODE", help="threshold: parallel, state-copy or speculative (parallel)")
    add("--confidence", metavar="KIND", help="threshold: gap, max, state or classifier (gap)")
    add_pack_arguments(add, shipped=True)
    add("--out", metavar="DIR", type=Path, default=Path("analysis/frontier"), help="directory to write (analysis/frontier)")
    add("--force", action="store_true", help="replace DIR if it is a frontier")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)


def run(args: argparse.Namespace) -> int:
    _check(args)

    from fathomlm.checkpoints.writing import whole_directory
    from fathomlm.lab.analyze.report import check_directory
    from fathomlm.lab.drawing import check_matplotlib
    from fathomlm.lab.evaluate.frontier_report import draw_frontier, point_table, summary_table
    from fathomlm.train.report import strict

    check_matplotlib()
    check_directory(args.out, "frontier", args.force)
    settings = {name: _settings(args, name) for name in args.models}  # refuses before weights are loaded
    form = _form(args)
    texts = _texts(args) if form is None else []
    curves: list[TradeOffCurve] = []
    reference: DecodedSweep | None = None
    for name in args.models:
        curve, full = _measure(args, name, settings[name], texts, form, reference)
        reference = reference or full
        curves.append(curve)
    table = summary_table(curves)
    record = _record(args, curves)
    with whole_directory(args.out, args.force, what="frontier analysis", sign="frontier.json") as place:
        picture = {"sweep": args.sweep, "quality": QUALITIES[args.quality], "lower": args.quality == "ppl"}
        draw_frontier(curves, table, place / "frontier.png", **picture)
        text = json.dumps(strict(record), ensure_ascii=False, allow_nan=False)
        (place / "frontier.json").write_text(text + "\n", encoding="utf-8")
    if args.json:
        print_record(record)
        return 0
    for curve in curves:
        print_table(point_table(curve, args.quality), f"{curve.model}: {curve.plan}")
    print_table(table)
    print(f"{args.out / 'frontier.png'} shows it; {args.out / 'frontier.json'} has the numbers")
    return 0


def _check(args: argparse.Namespace) -> None:
    from fathomlm.lab.evaluate.frontier import SWEEPS, read_thresholds

    check_least(args, "texts", "prompt_tokens", "repeats")
    if args.max_new_tokens < 2:
        raise OptionError(f"--max-new-tokens must be >= 2, got {args.max_new_tokens}")
    if args.sweep not in SWEEPS:
        raise OptionError(choices("sweep", args.sweep, SWEEPS))
    if args.quality not in QUALITIES:
        raise OptionError(choices("quality", args.quality, QUALITIES))
    if len(set(args.models)) < len(args.models):
        raise OptionError("a MODEL is named twice")
    exiting = args.sweep == "threshold" and len(args.models) == 1
    shipped = settle_pack(args, args.models[0], args.decode or "parallel" if exiting else None)
    if args.exits is not None and len(args.models) > 1:
        raise OptionError(f"--exits belong to one MODEL, and here are {len(args.models)}")
    pack_options(args)
    for name in ("thresholds", "decode", "confidence"):
        if getattr(args, name) is not None and args.sweep != "threshold":
            raise OptionError(f"--{name} goes with --sweep threshold")
    read_thresholds(args.thresholds)
    if shipped:
        tell_shipped(args.models[0])


def _settings(args: argparse.Namespace, name: str) -> tuple[SweepSetting, ...]:
    from fathomlm.checkpoints.resolve import encoder_of, plan_of
    from fathomlm.lab.evaluate.frontier import read_thresholds, sweep_settings, threshold_settings

    plan = plan_of(name, args.exits)
    if args.quality == "ppl" and encoder_of(name) is not None:
        raise OptionError(f"perplexity is for decoder-only models; {name} is an encoder-decoder")
    if args.sweep != "threshold":
        return sweep_settings(plan, args.sweep, args.exit_layer)
    return threshold_settings(
        plan,
        read_thresholds(args.thresholds),
        mode=args.decode or "parallel",
        exit_layer=_one_layer(args),
        confidence=args.confidence,
    )


def _one_layer(args: argparse.Namespace) -> int | None:
    if args.exit_layer is None:
        return None
    if not args.exit_layer.isdecimal():
        raise OptionError(f"--exit-layer takes one layer in a threshold sweep, from 1; got '{args.exit_layer}'")
    return int(args.exit_layer)


def _form(args: argparse.Namespace) -> PromptForm | None:
    """How rows with references are read; None where the data are text."""
    if args.quality in ("agreement", "ppl"):
        return None
    from fathomlm.lab.evaluate.metrics import find_metric
    from fathomlm.lab.evaluate.samples import choose_form

    find_metric(args.quality)
    return choose_form(args.data, source=None, prompt=None, reference=None, metric=args.quality, shots=None)


def _texts(args: argparse.Namespace) -> list[str]:
    from fathomlm.train.data.sources import expand, read

    documents = chain.from_iterable(read(source, (args.column,)) for source in expand([str(args.data)]))
    texts = list(islice((each.fields[0] for each in documents if each.fields[0].strip()), args.texts))
    if not texts:
        raise DataError(f"{args.data} has no text")
    return texts


def _measure(
    args: argparse.Namespace,
    name: str,
    settings: tuple[SweepSetting, ...],
    texts: Sequence[str],
    form: PromptForm | None,
    reference: DecodedSweep | None,
) -> tuple[TradeOffCurve, DecodedSweep]:
    from fathomlm.checkpoints.resolve import describe
    from fathomlm.cli.shown import model_name
    from fathomlm.decode.sampling import Sampling
    from fathomlm.lab.evaluate.frontier import build_curve, decode_settings

    args = argparse.Namespace(**vars(args) | {"model": name})
    model = load_any_model(args, **pack_options(args))
    samples, prompts = _prompts(args, model, texts, form)
    sampling = Sampling(max_new_tokens=args.max_new_tokens, ignore_eos=form is None, stop=() if form is None else form.stop)
    if args.sweep == "threshold":
        settings = (*settings, _adaptive(args, model, prompts, settings))
    with layer_bar(f"decoding {model_name(name)}", unit="texts") as tick:
        decoded = decode_settings(model, prompts, sampling, settings, repeats=args.repeats, on_done=tick)
    qualities = _qualities(args, model, settings, decoded, texts, samples)
    full = next(each for setting, each in zip(settings, decoded, strict=True) if setting.kind == "full")
    curve = build_curve(model_name(name), describe(model), settings, decoded, qualities, reference or full)
    return curve, full


def _prompts(
    args: argparse.Namespace, model: FathomModel, texts: Sequence[str], form: PromptForm | None
) -> tuple[list[Sample], list[list[int]]]:
    from fathomlm.decode.prompts import encode_prompt
    from fathomlm.lab.evaluate.generation import cut_prompt
    from fathomlm.lab.evaluate.samples import read_samples
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM

    encoder = isinstance(model, FathomForSeq2SeqLM)
    room = model.architecture.context - (0 if encoder else args.max_new_tokens)
    if room < 1:
        raise OptionError(f"--max-new-tokens must be < the model's context of {model.architecture.context:,}")
    if form is None:
        return [], _beginnings([encode_prompt(model, text) for text in texts], min(args.prompt_tokens, room), args.texts)
    samples = read_samples(args.data, form, limit=args.texts, alone=encoder)
    return samples, [cut_prompt(model, encode_prompt(model, sample.prompt), room) for sample in samples]


def _beginnings(documents: Sequence[list[int]], size: int, many: int) -> list[list[int]]:
    """The beginning of each document; where there are fewer documents than prompts, later parts of them too."""
    parts = [[tokens[at : at + size] for at in range(0, max(1, len(tokens) - size + 1), size)] for tokens in documents]
    turns = max(len(each) for each in parts)
    return [each[turn] for turn in range(turns) for each in parts if turn < len(each)][:many]


def _adaptive(
    args: argparse.Namespace, model: FathomModel, prompts: Sequence[list[int]], settings: Sequence[SweepSetting]
) -> SweepSetting:
    """The threshold that was learnt for this exit: beside it, or now, from the same prompts."""
    from fathomlm.decode.calibration import FILE, Calibration, calibrate
    from fathomlm.decode.sampling import Sampling
    from fathomlm.lab.evaluate.frontier import at_threshold

    exiting = settings[0].exiting
    assert exiting is not None
    (exit, *others) = exiting.exits(model.plan)
    if others:
        raise OptionError(f"this sweep has one exit, and the model has {len(others) + 1}; name one with --exit-layer")
    path = learnt_place(args) / FILE
    found = Calibration.load(path) if path.is_file() else None
    if found is None or (found.exit_layer, found.confidence) != (exit + 1, exiting.confidence):
        sampling = Sampling(max_new_tokens=args.max_new_tokens, ignore_eos=True)
        found = calibrate(model, prompts, sampling, exit_layer=exit + 1, confidence=exiting.confidence)
    return at_threshold(found.estimator.threshold, exiting.mode, exit + 1, exiting.confidence, kind="adaptive")


def _qualities(
    args: argparse.Namespace,
    model: FathomModel,
    settings: Sequence[SweepSetting],
    decoded: Sequence[DecodedSweep],
    texts: Sequence[str],
    samples: Sequence[Sample],
) -> list[tuple[float, float]]:
    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.lab.evaluate.frontier_quality import agreement, perplexities, text_metric
    from fathomlm.lab.evaluate.metrics import find_metric

    if args.quality == "agreement":
        return [agreement(model, each.results) for each in decoded]
    if args.quality == "ppl":
        lift_exit_vocab(model)
        with layer_bar("predicting", unit="windows") as tick:
            return perplexities(decoder_only(model, "perplexity"), settings, texts, on_done=tick)
    metric = find_metric(args.quality)
    return [text_metric(args.quality, metric, samples, each.results) for each in decoded]


def _record(args: argparse.Namespace, curves: Sequence[TradeOffCurve]) -> dict[str, Any]:
    from fathomlm import __version__

    names = ("sweep", "quality", "texts", "prompt_tokens", "max_new_tokens", "repeats", "exit_layer", "device")
    record = {"kind": "frontier", "version": __version__, "data": str(args.data), "models": args.models}
    record |= {name: getattr(args, name) for name in names}
    record["exit_pack"] = None if args.exits is None else str(args.exits)
    if args.sweep == "threshold":
        record["decode"] = args.decode or "parallel"
    curves_shown = [curve.to_dict() for curve in curves]
    return record | {"curves": curves_shown, "files": [str(args.out / f"frontier.{kind}") for kind in ("json", "png")]}
