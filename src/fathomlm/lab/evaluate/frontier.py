"""Quality against cost: a model at many depths, each with its measured latency and its counted FLOPs (thesis 2.6, its
trade-off figures; 4.6.3).

Latency is measured by decoding the same prompts at every setting, turn by turn so that all meet the same conditions, and
the fastest of some repeats counts. It is this machine's, so it is stated against the first model at full depth. FLOPs are
the thesis' (forward, without embedding and head): the layers that ran for each token, discarded drafts included.

The area under a curve is that of the stairs below it: the best score to be had for at most each cost, from nothing to the
first model's full depth. It is 1 for a model that is right at no cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.generation import Generation, exit_rate, mean_exit_layer
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.depth.cost import count
from fathomlm.engine.session import Decode, EngineSession, reference_only
from fathomlm.errors import DataError, OptionError, choices
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.evaluate.outputs import FULL, Output, depth_outputs, exit_outputs
from fathomlm.model.route import DepthControl
from fathomlm.model.seq2seq import FathomModel

WARM_UP = 2
MOST_ENGINES = 4
"""On a GPU: copies of the weights that a sweep may make."""
ROUNDING = 1e-9
KEEP = 0.99
"""Of the full model's score: what a setting must keep to count as one that loses nothing."""
SWEEPS = ("threshold", "depth", "exit-layer")
THRESHOLDS = tuple(step / 10 for step in range(11))
"""As in the thesis: from 0, every token exits, to 1, none does."""
MODES = ("parallel", "state-copy", "speculative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSetting:
    """One point to be measured."""

    name: str
    kind: str
    """full, sweep or adaptive."""
    value: float | None = None
    """The threshold, the recursions or the layer; None at full depth."""
    exiting: Exiting | None = None
    control: DepthControl | None = None
    output: Output = FULL
    """Where predictions are read, in sweeps without a threshold."""


FULL_DEPTH = SweepSetting(name="full", kind="full")


def sweep_settings(plan: DepthPlan, sweep: str, layers: str | None) -> tuple[SweepSetting, ...]:
    """Depths or layers, and the full model at the end. `layers` says which: recursion, layer, all or 4,8."""
    if sweep == "depth":
        if layers is not None:
            raise OptionError("--exit-layer requires --sweep exit-layer or threshold")
        chosen = depth_outputs(plan, "all")[:-1]  # all recursions are the full model
        found = [
            SweepSetting(name=each.name, kind="sweep", value=each.max_depth, control=each.control, output=each)
            for each in chosen
        ]
    elif sweep == "exit-layer":
        found = [
            SweepSetting(name=each.name, kind="sweep", value=each.layer, exiting=each.exiting, output=each)
            for each in exit_outputs(plan, layers or ("recursion" if plan.recursions > 1 and plan.whole_passes else "layer"))
            if each.layer is not None
        ]
    else:
        raise OptionError(choices("sweep", sweep, SWEEPS))
    return (*found, FULL_DEPTH)


def threshold_settings(
    plan: DepthPlan,
    thresholds: Sequence[float],
    *,
    mode: str = "parallel",
    exit_layer: int | None = None,
    confidence: str | None = None,
    **more: Any,
) -> tuple[SweepSetting, ...]:
    """A setting for each threshold, and the full model at the end. `more` are fields of `Exiting`."""
    if mode not in MODES:
        raise OptionError(choices("decoding mode", mode, MODES))
    found = [at_threshold(value, mode, exit_layer, confidence, **more) for value in sorted(set(thresholds))]
    for setting in found:
        assert setting.exiting is not None
        setting.exiting.exits(plan)  # refuses what the model does not have
    return (*found, FULL_DEPTH)


def at_threshold(
    value: float, mode: str, exit_layer: int | None, confidence: str | None, kind: str = "sweep", **more: Any
) -> SweepSetting:
    layers = None if exit_layer is None else (exit_layer,)
    exiting = Exiting(mode=mode, exit_layers=layers, confidence=confidence, threshold=value, **more)  # type: ignore[arg-type]
    name = f"{'adaptive' if kind == 'adaptive' else 'threshold'} {value:g}"
    return SweepSetting(name=name, kind=kind, value=value, exiting=exiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSweep:
    """What one setting made of the prompts."""

    results: tuple[Generation, ...]
    seconds: float
    """Of decoding, the fastest repeat of each text; a first token belongs to reading the prompt."""
    flops_per_token: float

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / max(1, sum(len(result.tokens) - 1 for result in self.results))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One setting of one model."""

    name: str
    kind: str
    """full, sweep or adaptive."""
    value: float | None
    quality: float
    """In its own unit: a part, a perplexity, points."""
    score: float
    """The same from 0 to 1, more is better: of a perplexity its inverse, the mean probability of a token."""
    ms_per_token: float
    relative_latency: float
    """Against the first model at full depth."""
    flops_per_token: float
    relative_flops: float
    exit_rate: float | None
    """The part of the tokens that exited early; None where none could."""
    mean_exit_layer: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffCurve:
    """All settings of one model."""

    model: str
    plan: str
    points: tuple[SweepPoint, ...]
    latency_area: float
    flops_area: float

    @property
    def kept(self) -> SweepPoint | None:
        """The smallest setting of the sweep that keeps most of the full model's score; None where none does."""
        full = next((point.score for point in self.points if point.kind == "full"), 0.0)
        swept = [point for point in self.points if point.kind == "sweep" and point.score >= KEEP * full]
        return min(swept, key=lambda point: point.value or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        kept = None if self.kept is None else self.kept.name
        return dataclasses.asdict(self) | {"points": [dataclasses.asdict(point) for point in self.points], "keeps_99": kept}


def decode_settings(
    model: FathomModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    settings: Sequence[SweepSetting],
    *,
    repeats: int = 2,
    reference: bool = False,
    on_done: OnProgress = unwatched,
) -> list[DecodedSweep]:
    """Every prompt at every setting, one text at a time; `reference` decodes without the engine. So does every setting where
    one has to: times of the two are not compared."""
    if repeats < 1:
        raise OptionError(f"repeats must be >= 1, got {repeats}")
    short = sampling.with_options(max_new_tokens=min(WARM_UP, sampling.max_new_tokens))
    decoders = _decoders(model, settings, reference)
    for decode in decoders:  # what a process does once is not timed
        decode(prompts[:1], short)
    made: list[list[Generation]] = [[] for _ in settings]
    fastest = [[float("inf")] * len(prompts) for _ in settings]
    total, done = repeats * len(prompts) * len(settings), 0
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            for place, decode in enumerate(decoders):
                (result,) = decode([prompt], sampling)
                fastest[place][number] = min(fastest[place][number], result.decode_seconds)
                if repeat == 0:
                    made[place].append(result)
                done += 1
                on_done(done, total)
    return [
        DecodedSweep(results=tuple(results), seconds=sum(times), flops_per_token=flops_per_token(model, setting, results))
        for setting, results, times in zip(settings, made, fastest, strict=True)
    ]


def _decoders(model: FathomModel, settings: Sequence[SweepSetting], reference: bool) -> list[Decode]:
    """Settings that differ in their threshold alone share an engine: on a GPU each packs the weights for itself."""
    keys = [
        (setting.control, setting.exiting and dataclasses.replace(setting.exiting, threshold=None)) for setting in settings
    ]
    many = model.decoder.embed.weight.is_cuda and len(set(keys)) > MOST_ENGINES
    if reference or many or any(reference_only(model, *key) is not None for key in keys):
        return [partial(generate, model, control=setting.control, exiting=setting.exiting) for setting in settings]
    sessions = {key: EngineSession(model, *key) for key in dict.fromkeys(keys)}
    found: list[Decode] = []
    for key, setting in zip(keys, settings, strict=True):
        threshold = None if setting.exiting is None else setting.exiting.threshold_now()
        found.append(partial(sessions[key].generate_all, threshold=threshold))
    return found


def flops_per_token(model: FathomModel, setting: SweepSetting, results: Sequence[Generation]) -> float:
    """Forward FLOPs per generated token, at the mean length of the sequences."""
    plan = model.plan
    context = max(1, round(sum(len(r.prompt_tokens) + len(r.tokens) for r in results) / len(results)))
    counted = {"relaxation": model.relaxation, "context": context}
    if plan.routing is not None:
        depths = [depth for result in results for depth in result.depths or ()]
        running = [sum(depth > recursion for depth in depths) / len(depths) for recursion in range(plan.recursions)]
        return count(model.architecture, plan, capacity=running, **counted).forward_flops_per_token  # type: ignore[arg-type]
    if setting.control is not None:
        deepest = setting.control.recursions(plan.recursions)
        running = [float(recursion < deepest) for recursion in range(plan.recursions)]
        return count(model.architecture, plan, capacity=running, **counted).forward_flops_per_token  # type: ignore[arg-type]
    whole = count(model.architecture, plan, **counted).forward_flops_per_token  # type: ignore[arg-type]
    if setting.exiting is None:
        return whole
    statistics = [result.exits for result in results if result.exits is not None]
    tokens = sum(len(result.tokens) for result in results)
    return whole * sum(exits.layers_run for exits in statistics) / (tokens * plan.unrolled_layers)


def build_curve(
    model: str,
    plan: str,
    settings: Sequence[SweepSetting],
    decoded: Sequence[DecodedSweep],
    qualities: Sequence[tuple[float, float]],
    reference: DecodedSweep,
) -> TradeOffCurve:
    """`qualities` are (quality, score) of each setting; `reference` is the first model at full depth."""
    if not reference.seconds:
        raise DataError(
            "the tokens of each completion came at once at full depth, so they cannot be timed; write longer ones"
        )
    points = tuple(
        SweepPoint(
            name=setting.name,
            kind=setting.kind,
            value=setting.value,
            quality=quality,
            score=score,
            ms_per_token=each.ms_per_token,
            relative_latency=each.ms_per_token / reference.ms_per_token,
            flops_per_token=each.flops_per_token,
            relative_flops=each.flops_per_token / reference.flops_per_token,
            exit_rate=None if setting.exiting is None else exit_rate(each.results),
            mean_exit_layer=None if setting.exiting is None else mean_exit_layer(each.results),
        )
        for setting, each, (quality, score) in zip(settings, decoded, qualities, strict=True)
    )
    return TradeOffCurve(
        model=model,
        plan=plan,
        points=points,
        latency_area=area([(point.relative_latency, point.score) for point in points]),
        flops_area=area([(point.relative_flops, point.score) for point in points]),
    )


def area(points: Sequence[tuple[float, float]]) -> float:
    """Under the stairs of the best score for at most each cost, from cost 0 to 1."""
    total, best, at = 0.0, 0.0, 0.0
    for cost, score in sorted(points):
        if cost > 1 + ROUNDING:
            break
        total += best * (cost - at)
        best, at = max(best, score), cost
    return total + best * (1 - at)


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other beats: none is at most as dear and better, or cheaper and as good."""
    return [not any((c <= cost and s > score) or (c < cost and s >= score) for c, s in points) for cost, score in points]
