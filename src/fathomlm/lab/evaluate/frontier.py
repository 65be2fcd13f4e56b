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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.decode.full import generate
from fathomlm.decode.rows import Generation, exit_rate, mean_exit_layer
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab.evaluate.frontier_settings import Setting
from fathomlm.model.seq2seq import FathomModel

Tick = Callable[[int, int], None]
WARM_UP = 2
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one setting made of the prompts."""

    results: tuple[Generation, ...]
    seconds: float
    """Of decoding, the fastest repeat of each text; a first token belongs to reading the prompt."""
    flops_per_token: float

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / max(1, sum(len(result.tokens) - 1 for result in self.results))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
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
    """The part of the tokens that left early; None where none could."""
    mean_exit_layer: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One model."""

    model: str
    plan: str
    points: tuple[Point, ...]
    latency_area: float
    flops_area: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"points": [dataclasses.asdict(point) for point in self.points]}


def decode_settings(
    model: FathomModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    settings: Sequence[Setting],
    *,
    repeats: int = 2,
    on_done: Tick | None = None,
) -> list[Decoded]:
    """Every prompt at every setting, one text at a time."""
    if repeats < 1:
        raise OptionError(f"repeats must be >= 1, got {repeats}")
    short = sampling.with_options(max_new_tokens=min(WARM_UP, sampling.max_new_tokens))
    for setting in settings:  # what a process does once is not timed
        generate(model, prompts[:1], short, control=setting.control, exiting=setting.exiting)
    made: list[list[Generation]] = [[] for _ in settings]
    fastest = [[float("inf")] * len(prompts) for _ in settings]
    total, done = repeats * len(prompts) * len(settings), 0
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            for place, setting in enumerate(settings):
                (result,) = generate(model, [prompt], sampling, control=setting.control, exiting=setting.exiting)
                fastest[place][number] = min(fastest[place][number], result.decode_seconds)
                if repeat == 0:
                    made[place].append(result)
                done += 1
                if on_done is not None:
                    on_done(done, total)
    return [
        Decoded(results=tuple(results), seconds=sum(times), flops_per_token=flops_per_token(model, setting, results))
        for setting, results, times in zip(settings, made, fastest, strict=True)
    ]


def flops_per_token(model: FathomModel, setting: Setting, results: Sequence[Generation]) -> float:
    """Forward FLOPs for each token that was made, at the length that the texts had in the middle."""
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
    settings: Sequence[Setting],
    decoded: Sequence[Decoded],
    qualities: Sequence[tuple[float, float]],
    reference: Decoded,
) -> Curve:
    """`qualities` are (quality, score) of each setting; `reference` is the first model at full depth."""
    points = tuple(
        Point(
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
    return Curve(
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
