"""Which model size a compute budget is best spent on, from finished runs (thesis 4.6.1 "Compute-optimal Scaling Analysis").

The runs of one architecture under one budget lie on a curve over the logarithm of their parameters, which has its lowest
point where neither a larger model nor more tokens would have helped. As in the thesis a polynomial is laid through them; a
quadratic, as three sizes are enough for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.runs import Run, read_runs, summarise

SAME_BUDGET = 0.05
"""Runs whose FLOPs differ by less than this part of the smaller count as of one budget: lengths are whole steps."""
LEAST = 3
"""Sizes that a quadratic needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run in the numbers that a fit needs."""

    run: str
    architecture: str
    """vanilla, recursive or mor, with the number of recursions: "mor 3"."""
    non_embedding_parameters: int
    flops: float
    """Forward FLOPs that were spent, as the thesis counts."""
    tokens: int
    loss: float
    """The last validation loss, in nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The best size for one architecture under one budget."""

    architecture: str
    flops: float
    """The mean of the runs'."""
    runs: list[str]
    sizes: list[int]
    losses: list[float]
    coefficients: list[float] | None
    """loss = a x^2 + b x + c over x = ln(parameters), in this order; None with fewer than three sizes."""
    best_parameters: float | None
    """Where the curve is lowest; None where it is not curved upwards."""
    best_loss: float | None
    best_tokens: float | None
    """What the budget buys at that size, between the neighbouring runs in proportion to their logarithms."""
    inside: bool | None
    """Whether that lies between the smallest and the largest run: beyond them it is a guess."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def at(self, parameters: float) -> float:
        """The fitted loss of a size."""
        assert self.coefficients is not None
        return float(np.polyval(self.coefficients, math.log(parameters)))


def read_finished(paths: Sequence[Path]) -> list[FinishedRun]:
    """The runs at some paths. Each needs the recipe that it was started with, and a validation loss."""
    return [_finished(run, run.file.with_name("recipe.yaml")) for run in read_runs(paths)]


def _finished(run: Run, recipe_file: Path) -> FinishedRun:
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.student import read_student

    if not recipe_file.is_file():
        raise OptionError(f"run {run.name} has no {recipe_file.name} beside its records, so its size is not known")
    summary = summarise(run)
    if summary.validation is None:
        raise OptionError(f"run {run.name} was never validated; a fit needs its validation loss")
    flops = next((float(record["flops"]) for record in reversed(run.validation) if record.get("flops")), None)
    if flops is None:
        raise OptionError(f"run {run.name} has no record of its FLOPs")
    parts = read_student(read_recipe(recipe_file))
    cost = count(parts.architecture, parts.plan, relaxation=parts.relaxation)
    return FinishedRun(
        run=run.name,
        architecture=_architecture(parts.plan.recursions, parts.plan.routing is not None),
        non_embedding_parameters=cost.non_embedding_parameters,
        flops=flops,
        tokens=summary.tokens,
        loss=summary.validation,
    )


def _architecture(recursions: int, routed: bool) -> str:
    return "vanilla" if recursions == 1 else f"{'mor' if routed else 'recursive'} {recursions}"


def fit_runs(runs: Iterable[FinishedRun]) -> list[Fit]:
    """A fit for each architecture and budget, small budgets first."""
    by_kind: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_kind.setdefault(run.architecture, []).append(run)
    fits = [_fit(kind, group) for kind, members in by_kind.items() for group in _budgets(members)]
    return sorted(fits, key=lambda fit: (fit.architecture, fit.flops))


def _budgets(runs: Sequence[FinishedRun]) -> list[list[FinishedRun]]:
    """Runs that spent about the same, together."""
    groups: list[list[FinishedRun]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops <= groups[-1][0].flops * (1 + SAME_BUDGET):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _fit(architecture: str, runs: Sequence[FinishedRun]) -> Fit:
    ordered = sorted(runs, key=lambda run: run.non_embedding_parameters)
    sizes, losses = [run.non_embedding_parameters for run in ordered], [run.loss for run in ordered]
    x = np.log(np.array(sizes, dtype=np.float64))
    coefficients, lowest = None, None
    if len(set(sizes)) >= LEAST:
        middle = float(x.mean())  # a polynomial around 0 of numbers near 18 loses digits
        a, b, c = (float(value) for value in np.polyfit(x - middle, np.array(losses), 2))
        coefficients = [a, b - 2 * a * middle, c - b * middle + a * middle**2]
        lowest = middle - b / (2 * a) if a > 0 else None
    tokens = None if lowest is None else _tokens_at(lowest, x, np.log([run.tokens for run in ordered]))
    return Fit(
        architecture=architecture,
        flops=sum(run.flops for run in runs) / len(runs),
        runs=[run.run for run in ordered],
        sizes=sizes,
        losses=losses,
        coefficients=coefficients,
        best_parameters=None if lowest is None else math.exp(lowest),
        best_loss=None if lowest is None or coefficients is None else float(np.polyval(coefficients, lowest)),
        best_tokens=tokens,
        inside=None if lowest is None else bool(x[0] <= lowest <= x[-1]),
    )


def _tokens_at(lowest: float, x: Any, log_tokens: Any) -> float:
    """Beyond the runs along the line of the two outermost."""
    slope, start = np.polyfit(x, log_tokens, 1)
    inside = x[0] <= lowest <= x[-1]
    return math.exp(float(np.interp(lowest, x, log_tokens)) if inside else float(slope * lowest + start))
