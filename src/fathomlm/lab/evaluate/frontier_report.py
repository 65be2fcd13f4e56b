"""Quality against cost as tables and a picture, one line a model (thesis 2.6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathomlm import __version__
from fathomlm.checkpoints.resolve import decoder_only, describe, encoder_of, plan_of
from fathomlm.cli.common import read_documents, threshold_file, to_json
from fathomlm.cli.decoding import lift_exit_vocab, tell_shipped
from fathomlm.cli.display import Rows, model_name, print_table, progress_bar
from fathomlm.decode.calibration import Calibration, calibrate
from fathomlm.decode.prompts import encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.lab.common import analysis_directory, check_directory, optional
from fathomlm.lab.drawing import (
    DASHES,
    LINES,
    MARKERS,
    STAR,
    check_matplotlib,
    figure_over_table,
    plain_axes,
    save_figure,
    shortened,
)
from fathomlm.lab.evaluate.frontier import (
    THRESHOLDS,
    DecodedSweep,
    SweepPoint,
    SweepSetting,
    TradeOffCurve,
    at_threshold,
    build_curve,
    decode_settings,
    frontier,
    sweep_settings,
    threshold_settings,
)
from fathomlm.lab.evaluate.generation import cut_prompt
from fathomlm.lab.evaluate.options import QUALITIES, Frontier
from fathomlm.lab.evaluate.qualities import agreement, perplexities, text_metric
from fathomlm.lab.evaluate.samples import PromptForm, Sample, choose_form, find_metric, read_samples
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

CLOSE = 0.05
"""Points that are nearer than this part of both axes share one label."""


def point_table(curve: TradeOffCurve, quality: str) -> Rows:
    """A row a setting, with what lies on the frontier marked."""
    best = frontier([(point.relative_latency, point.score) for point in curve.points])
    rows = [["setting", quality, "ms/token", "latency", "FLOPs", "early", "best"]]
    for point, on in zip(curve.points, best, strict=True):
        left = optional(point.exit_rate, ".1%")
        costs = [f"{point.ms_per_token:.2f}", f"{point.relative_latency:.3f}", f"{point.relative_flops:.3f}"]
        rows.append([point.name, f"{point.quality:.4g}", *costs, left, "yes" if on else ""])
    return rows


def summary_table(curves: Sequence[TradeOffCurve]) -> Rows:
    """A row a model."""
    rows = [["model", "full quality", "ms/token", "latency area", "FLOPs area", "adaptive"]]
    for curve in curves:
        full = next(point for point in curve.points if point.kind == "full")
        found = next((point for point in curve.points if point.kind == "adaptive"), None)
        adaptive = "-" if found is None else f"{found.value:.3f}: {found.quality:.4g} at {found.relative_latency:.2f}x"
        areas = [f"{curve.latency_area:.4f}", f"{curve.flops_area:.4f}"]
        rows.append([curve.model, f"{full.quality:.4g}", f"{full.ms_per_token:.2f}", *areas, adaptive])
    return rows


def draw_frontier(curves: Sequence[TradeOffCurve], table: Rows, out: Path, options: Frontier) -> None:
    """The first column of `table` names the models in their order."""
    quality, lower = QUALITIES[options.quality], options.quality == "ppl"
    colours = [LINES[place % len(LINES)] for place in range(len(curves))]
    figure, grid = figure_over_table(13.2, [5.4], table, colours, columns=2)
    qualities = [point.quality for curve in curves for point in curve.points]
    for column, (field, label) in enumerate(
        (("relative_latency", "measured time per token"), ("relative_flops", "forward FLOPs per token"))
    ):
        axes = figure.add_subplot(grid[0, column])
        for place, curve in enumerate(curves):
            _draw_curve(axes, curve, field, colours[place], MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)])
        axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlim(left=0)
        if lower and max(qualities) > 20 * min(qualities):
            axes.set_yscale("log")
        cost = f"{label} (part of {shortened(curves[0].model)} at full depth)"
        plain_axes(axes, x=cost, y=f"{quality}{', less is better' if lower else ''}")
        axes.legend(fontsize=8, framealpha=0.85)
    name = shortened(curves[0].model) if len(curves) == 1 else f"{len(curves)} models"
    save_figure(figure, f"{name}: {quality.split(' (')[0]} against cost, by {options.sweep}", out)


def _draw_curve(axes: Any, curve: TradeOffCurve, field: str, colour: str, mark: str, dash: Any) -> None:
    swept = [point for point in curve.points if point.kind == "sweep"]
    full = [point for point in curve.points if point.kind == "full"]
    ordered = [*swept, *full]
    name = shortened(curve.model)
    xs, ys = [getattr(point, field) for point in ordered], [point.quality for point in ordered]
    axes.plot(xs, ys, color=colour, marker=mark, linestyle=dash, linewidth=1.4, markersize=5, label=name)
    for point in full:
        edge = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
        axes.plot(
            [getattr(point, field)], [point.quality], marker="o", linestyle="none", label=f"{name}, full depth", **edge
        )
    for point in curve.points:
        if point.kind == "adaptive":
            label = f"{name}, adaptive threshold {point.value:.3f}"
            at = [getattr(point, field)], [point.quality]
            axes.plot(*at, color=colour, markersize=16, zorder=5, label=label, **STAR)
    for point in _apart(swept, field):
        place = (getattr(point, field), point.quality)
        axes.annotate(f"{point.value:g}", place, textcoords="offset points", xytext=(5, 5), fontsize=7, color=colour)


def _apart(points: Sequence[SweepPoint], field: str) -> list[SweepPoint]:
    """Points whose values can stand beside them without covering each other."""
    qualities = [point.quality for point in points]
    high = (max(qualities) - min(qualities) if points else 0.0) or 1.0
    kept: list[SweepPoint] = []
    for point in points:
        near = (
            abs(getattr(point, field) - getattr(other, field)) < CLOSE and abs(point.quality - other.quality) < CLOSE * high
            for other in kept
        )
        if not any(near):
            kept.append(point)
    return kept


def run(options: Frontier) -> int:
    pack, form = _check(options), _form(options)

    check_matplotlib()
    check_directory(options.out, "frontier", options.force)
    settings = {name: _settings(options, pack, name) for name in options.models}  # refuses before weights are loaded
    documents = read_documents([str(options.data)], options.column, options.prompts) if form is None else []
    curves: list[TradeOffCurve] = []
    reference: DecodedSweep | None = None
    for name in options.models:
        curve, full = _measure(options, pack, name, settings[name], documents, form, reference)
        reference = reference or full
        curves.append(curve)
    table = summary_table(curves)
    record = _record(options, pack, curves)
    with analysis_directory(options.out, "frontier", options.force) as place:
        draw_frontier(curves, table, place / "frontier.png", options)
        (place / "frontier.json").write_text(to_json(record) + "\n", encoding="utf-8")

    def show(record: dict[str, Any]) -> None:
        for curve in curves:
            print_table(point_table(curve, options.quality), f"{curve.model}: {curve.plan}")
        print_table(table)
        for curve in curves:
            if curve.kept is not None:
                print(f"{curve.model}: {curve.kept.name} keeps 99% of the full model's score")
        print(f"wrote {options.out / 'frontier.png'} and {options.out / 'frontier.json'}")

    return options.answer(record, show)


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
        if given := [f"--{name}" for name in ("source", "prompt", "references") if getattr(options, name) is not None]:
            raise OptionError(f"{given[0]} requires a --quality of completions: rouge, bleu, squad or number")
        return None

    find_metric(options.quality)
    return choose_form(
        options.data, source=options.source, prompt=options.template, reference=options.references, metric=options.quality,
        shots=None,
    )  # fmt: skip


def _measure(
    options: Frontier,
    pack: Path | None,
    name: str,
    settings: tuple[SweepSetting, ...],
    documents: Sequence[str],
    form: PromptForm | None,
    reference: DecodedSweep | None,
) -> tuple[TradeOffCurve, DecodedSweep]:
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
    if options.quality == "agreement":
        return [agreement(model, each.results) for each in decoded]
    if options.quality == "ppl":
        lift_exit_vocab(model)
        with progress_bar("predicting", unit="windows") as update:
            return perplexities(decoder_only(model, "perplexity"), settings, documents, on_done=update)
    metric = find_metric(options.quality)
    return [text_metric(options.quality, metric, samples, each.results) for each in decoded]


def _record(options: Frontier, pack: Path | None, curves: Sequence[TradeOffCurve]) -> dict[str, Any]:
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
