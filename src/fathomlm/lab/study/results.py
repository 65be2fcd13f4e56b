"""What follows from a study's records: a row for each variant and budget, and a verdict for each claim. Both come
from differences between variants, paired by seed, with 95 % intervals.

Runs of one seed share their initialisation and their data, so a seed's luck is common to all variants and falls out of
differences. What is left, the residual of variant and seed, is taken over all variants of a study that have the same seeds:
with two seeds a pair alone would have one degree of freedom, and an interval six times as wide. Where fewer than three
variants share the seeds, the pair's own spread is taken. With one seed there is no interval, and so no order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fathomlm.lab.analyze.scaling import FinishedRun, ScalingFit, architecture_name, fit_runs
from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Record, identity
from fathomlm.lab.study.scores import counted
from fathomlm.lab.study.spec import Budget, Claim, Study, Variant

METRICS = {
    "sampling_accuracy": "sampling accuracy",
    "dead_tokens": "dead tokens",
    "max_violation": "MaxVio",
    "entropy": "entropy",
    "mean_depth": "mean depth",
}
"""Of routers, in a report's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A variant under a budget, over its seeds."""

    variant: Variant
    budget: Budget
    job: Job
    """Of the first seed: its shapes are all seeds'."""
    records: Mapping[int, Record]
    """Finished runs by seed."""
    against: Difference | None
    """Its loss less the baseline's; None for the baseline itself, and where there is none."""
    is_baseline: bool

    def by_seed(self, metric: str) -> dict[int, float]:
        """A metric of the finished runs that have it."""
        found = {seed: metric_of(record, metric) for seed, record in self.records.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, metric: str = "loss") -> float | None:
        values = self.by_seed(metric)
        return fmean(values.values()) if values else None

    @property
    def rate(self) -> float | None:
        """Tokens a second in training, from runs that had the device to themselves."""
        alone = [record for record in self.records.values() if record.get("processes", 1) == 1]
        rates = [float(record["tokens_per_s"]) for record in alone if record.get("tokens_per_s")]
        return fmean(rates) if rates else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim at one place: under one budget, for two variants."""

    claim: Claim
    budget: str
    one: str
    other: str
    found: Difference | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    study: Study
    rows: tuple[Row, ...]
    judged: tuple[Judged, ...]
    failed: tuple[Record, ...]
    planned: int
    left_out: int
    """Finished runs on another corpus than most."""

    @property
    def records(self) -> list[Record]:
        return [record for row in self.rows for record in row.records.values()]

    @property
    def over_sizes(self) -> bool:
        """Whether sizes are compared under equal FLOPs. Under equal tokens variants differ in other things, and a curve
        over their sizes would say nothing."""
        return all("flops" in budget.section for budget in self.study.budgets)

    def fits(self) -> list[ScalingFit]:
        """Quadratics over the size, for each architecture and budget of FLOPs with three sizes or more."""
        if not self.over_sizes:
            return []
        runs = [_fitted(row) for row in self.rows if row.records]
        return [fit for fit in fit_runs(runs) if fit.coefficients is not None]


def metric_of(record: Record, metric: str) -> float | None:
    """Its loss, a part of its last validation (`exit_15` is the loss at the exit after layer 15), or what a task is compared
    by, at an exit as `exit_15.hellaswag`."""
    exit_, _, task = metric.rpartition(".")
    scores = record.get("exit_scores", {}).get(exit_, {}) if exit_ else record.get("scores", {})
    if task in scores:
        return counted(scores[task])[0]
    value = record["loss"] if metric == "loss" else record["final"].get(metric)
    return None if value is None else float(value)


def collect(study: Study, records: Iterable[Record]) -> Results:
    """The results of a study: its finished runs are those in `records` whose settings are those of the YAML now."""
    jobs = jobs_of(study, Place(None, Path()))
    wanted = {job.fingerprint for job in jobs}
    own = [record for record in records if record["fingerprint"] in wanted]
    checksums = Counter(
        corpus_checksum for _, corpus_checksum in {identity(record) for record in own if record["status"] == "finished"}
    )
    corpus_checksum = max(sorted(checksums), key=lambda each: checksums[each], default=None)
    finished = {r["fingerprint"]: r for r in own if r["status"] == "finished" and r["data"]["mark"] == corpus_checksum}
    failed = {r["fingerprint"]: r for r in own if r["status"] == "failed" and r["fingerprint"] not in finished}
    made: dict[tuple[str, str], dict[int, Record]] = {}
    first: dict[tuple[str, str], Job] = {}
    for job in jobs:
        key = job.run.variant.name, job.run.budget.name
        first.setdefault(key, job)
        made.setdefault(key, {})
        if job.fingerprint in finished:
            made[key][job.run.seed] = finished[job.fingerprint]
    rows = tuple(_row(study, v, b, first, made) for b in study.budgets for v in study.variants)
    return Results(
        study=study,
        rows=rows,
        judged=tuple(judged for claim in study.claims for judged in judge(study, claim, rows)),
        failed=tuple(failed.values()),
        planned=len(jobs),
        left_out=sum(checksums.values()) - len(finished) if corpus_checksum is not None else 0,
    )


def _row(study: Study, variant: Variant, budget: Budget, first: dict[Any, Job], made: dict[Any, dict[int, Record]]) -> Row:
    base = study.baseline_of(variant)

    def losses(name: str) -> dict[int, float]:
        return {seed: float(record["loss"]) for seed, record in made[name, budget.name].items()}

    same = base.name == variant.name
    among = [losses(each.name) for each in study.variants]
    return Row(
        variant=variant,
        budget=budget,
        job=first[variant.name, budget.name],
        records=made[variant.name, budget.name],
        against=None if same else difference(losses(variant.name), losses(base.name), among),
        is_baseline=same,
    )


def judge(study: Study, claim: Claim, rows: Iterable[Row]) -> list[Judged]:
    """A claim under each of its budgets, at each place of the other axes or for the best of each side."""
    found = []
    for budget in study.budgets:
        if claim.budgets and budget.name not in claim.budgets:
            continue
        values = {row.variant.name: row.by_seed(claim.metric) for row in rows if row.budget.name == budget.name}
        for one, other in _pairs(study, claim, values):
            complete = not claim.best or _common_seeds(study, claim, values)  # the best of a part is not the best
            gap = difference(values[one], values[other], [v for v in values.values() if v]) if complete else None
            verdict = decide(gap, *((-math.inf, 0.0) if claim.same is None else (-claim.within, claim.within)))
            found.append(Judged(claim=claim, budget=budget.name, one=one, other=other, found=gap, verdict=verdict))
    return found


def _pairs(study: Study, claim: Claim, values: Mapping[str, BySeed]) -> list[tuple[str, str]]:
    names = {variant.name for variant in study.variants}
    one, other = claim.sides
    if one in names and other in names:
        return [(one, other)]
    sides = _sides(study, claim)
    if claim.best:
        seeds = _common_seeds(study, claim, values)
        best = [min(side, key=lambda v: fmean(values[v.name][s] for s in seeds)) if seeds else side[0] for side in sides]
        return [(best[0].name, best[1].name)]
    pairs = ((v, study.at(other, v.labels)) for v in sides[0])
    return [(v.name, peer.name) for v, peer in pairs if peer is not None]


def _sides(study: Study, claim: Claim) -> list[list[Variant]]:
    """All variants on each side of a claim about two values of an axis."""
    axis = study.axis_of(claim.sides[0])
    return [[v for v in study.variants if v.labels.get(axis) == side] for side in claim.sides]


def _common_seeds(study: Study, claim: Claim, values: Mapping[str, BySeed]) -> set[int]:
    """The seeds that all variants of both sides have."""
    return set.intersection(*(set(values[v.name]) for side in _sides(study, claim) for v in side))


def overall(judged: Iterable[Judged]) -> str:
    """One word for a claim that was tried at several places; it holds only where it holds everywhere."""
    counts = Counter(each.verdict for each in judged)
    if len(counts) == 1:
        return next(iter(counts))
    words = ", ".join(f"{counts[verdict]} {verdict.split()[0]}" for verdict in ("confirmed", "refuted") if counts[verdict])
    rest = sum(counts.values()) - counts["confirmed"] - counts["refuted"]
    return "not resolved at this scale" + (f" ({words}, {rest} open)" if words else "")


def _fitted(row: Row) -> FinishedRun:
    record = next(iter(row.records.values()))
    loss = row.mean()
    assert loss is not None
    return FinishedRun(
        run=f"{row.variant.name}/{row.budget.name}",
        architecture=architecture_name(record["recursions"], record["router"] is not None),
        non_embedding_parameters=int(record["parameters"]),
        flops=float(record["flops"]),
        tokens=int(record["tokens"]),
        loss=loss,
    )


T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""
LEAST_VARIANTS = 3
"""That a pooled spread is taken from."""

Verdict = Literal["confirmed", "refuted", "not resolved at this scale", "not run yet"]
BySeed = Mapping[int, float]
"""A metric of one variant by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of two variants over the seeds that both have."""

    mean: float
    seeds: int
    half: float | None
    """Half the width of the 95 % interval; None with one seed."""
    freedom: int
    """Degrees of freedom of the spread."""

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of a single run around variant and seed."""

    deviation: float
    freedom: int


def t_95(freedom: int) -> float:
    """Beyond the table its normal limit, widened to first order."""
    return T_95[freedom - 1] if freedom <= len(T_95) else 1.960 * (1 + 1.21 / freedom)


def residual(variants: Sequence[BySeed]) -> Spread | None:
    """What is left of losses when each variant's and each seed's mean is taken out; None where too little is known."""
    shared = sorted(set.intersection(*(set(values) for values in variants))) if variants else []
    V, S = len(variants), len(shared)
    if S < 2 or V < 2:
        return None
    rows = [fmean(values[seed] for seed in shared) for values in variants]
    columns = [fmean(values[seed] for values in variants) for seed in shared]
    whole = fmean(rows)
    squares = sum(
        (values[seed] - row - column + whole) ** 2
        for values, row in zip(variants, rows, strict=True)
        for seed, column in zip(shared, columns, strict=True)
    )
    freedom = (V - 1) * (S - 1)
    return Spread(math.sqrt(squares / freedom), freedom)


def difference(one: BySeed, other: BySeed, among: Sequence[BySeed] = ()) -> Difference | None:
    """`one` less `other`; `among` are all variants of the study under that budget. None without a common seed."""
    shared = sorted(set(one) & set(other))
    if not shared:
        return None
    mean = fmean(one[seed] - other[seed] for seed in shared)
    peers = [values for values in among if set(shared) <= set(values)]
    cut = [{seed: values[seed] for seed in shared} for values in peers]
    pair = [{seed: values[seed] for seed in shared} for values in (one, other)]
    spread = residual(cut if len(cut) >= LEAST_VARIANTS else pair)
    if spread is None:
        return Difference(mean=mean, seeds=len(shared), half=None, freedom=0)
    half = t_95(spread.freedom) * spread.deviation * math.sqrt(2 / len(shared))
    return Difference(mean=mean, seeds=len(shared), half=half, freedom=spread.freedom)


def decide(found: Difference | None, low: float, high: float) -> Verdict:
    """Whether a difference that was claimed to lie between two bounds does."""
    if found is None:
        return "not run yet"
    if found.low is None or found.high is None:
        return "not resolved at this scale"
    if low < found.low and found.high < high:
        return "confirmed"
    return "refuted" if found.low > high or found.high < low else "not resolved at this scale"
