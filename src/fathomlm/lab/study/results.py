"""What follows from a study's records: a row for each variant and budget, and a verdict for each claim. Both come from
differences between variants (`lab/study/differences.py`), whose spread is that of all runs that were made alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from fathomlm.lab.analyze.scaling import FinishedRun, ScalingFit, architecture_name, fit_runs
from fathomlm.lab.study.differences import DECIDED, LEVEL, BySeed, Difference, Verdict, decide, difference, holm, p_value
from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Record, fingerprint, identity
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
SHORT: dict[Verdict, str] = {
    "confirmed": "confirmed",
    "refuted": "refuted",
    "not resolved at this scale": "open",
    "not run yet": "not run",
}
TOUCH = 1.5
"""Seconds by which runs that follow each other may seem to overlap: the dates of records are whole seconds."""
Peers = Sequence[Mapping[int, Record]]
"""Finished runs of some variants, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A variant under a budget, over its seeds."""

    variant: Variant
    budget: Budget
    job: Job
    """Of the first seed: its shapes are all seeds'."""
    records: Mapping[int, Record]
    """Finished runs by seed."""
    alone: tuple[int, ...]
    """The seeds of those that had the device to themselves from beginning to end."""
    against: Difference | None
    """Its loss less the baseline's; None for the baseline itself, and where there is none."""
    is_baseline: bool

    def by_seed(self, metric: str) -> dict[int, float]:
        return metric_by_seed(self.records, metric)

    def mean(self, metric: str = "loss") -> float | None:
        values = self.by_seed(metric)
        return fmean(values.values()) if values else None

    @property
    def rate(self) -> float | None:
        """Tokens a second in training, from runs that had the device to themselves."""
        found = [self.records[seed].get("tokens_per_s") for seed in self.alone]
        rates = [float(rate) for rate in found if rate]
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
    p: float | None = None
    """Of the verdict, adjusted by Holm's method for all comparisons of the study (`adjusted`)."""

    @property
    def decided(self) -> bool:
        return self.verdict in DECIDED

    @property
    def remains(self) -> bool:
        """Whether it is decided also where all comparisons of its study are tested together."""
        return self.decided and self.p is not None and self.p < LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    study: Study
    rows: tuple[Row, ...]
    judged: tuple[Judged, ...]
    failed: tuple[Record, ...]
    planned: int
    left_out: int
    """Finished runs on another corpus than most."""
    decoded: str = ""
    """Where claims about texts that its models wrote are judged too (`lab.study.decoded`): what they were judged by."""

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


def metric_by_seed(records: Mapping[int, Record], metric: str) -> dict[int, float]:
    """A metric of those runs that have it."""
    found = {seed: metric_of(record, metric) for seed, record in records.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def planned_jobs(study: Study) -> list[Job]:
    """All runs of a study, to be looked at."""
    return jobs_of(study, Place(None, Path()))


def collect(
    study: Study,
    records: Iterable[Record],
    others: Iterable[Study] = (),
    jobs_of_study: Callable[[Study], list[Job]] = planned_jobs,
) -> Results:
    """The results of a study: its finished runs are those in `records` whose settings are those of the YAML now. The spread
    is also that of `others` with the same common settings and budgets."""
    records = list(records)
    jobs = jobs_of_study(study)
    wanted = {job.fingerprint for job in jobs}
    own = [record for record in records if record["fingerprint"] in wanted]
    checksums = Counter(
        corpus_checksum for _, corpus_checksum in {identity(record) for record in own if record["status"] == "finished"}
    )
    corpus_checksum = max(sorted(checksums), key=lambda each: checksums[each], default=None)
    on_corpus = [r for r in records if r["status"] == "finished" and r["data"]["mark"] == corpus_checksum]
    known = {record["fingerprint"]: record for record in on_corpus}
    finished = {key: record for key, record in known.items() if key in wanted}
    failed = {r["fingerprint"]: r for r in own if r["status"] == "failed" and r["fingerprint"] not in finished}
    made: dict[tuple[str, str], dict[int, Record]] = {}
    first: dict[tuple[str, str], Job] = {}
    for job in jobs:
        key = job.run.variant.name, job.run.budget.name
        first.setdefault(key, job)
        made.setdefault(key, {})
        if job.fingerprint in finished:
            made[key][job.run.seed] = finished[job.fingerprint]
    alike = [(study, jobs), *((each, jobs_of_study(each)) for each in others if each.common == study.common)]
    peers = {budget.name: _peers(budget, alike, known) for budget in study.budgets}
    shared = beside_others(records)
    rows = tuple(_row(study, v, b, first, made, peers[b.name], shared) for b in study.budgets for v in study.variants)
    return Results(
        study=study,
        rows=rows,
        judged=adjusted(judged for claim in study.claims for judged in judge(study, claim, rows, peers)),
        failed=tuple(failed.values()),
        planned=len(jobs),
        left_out=sum(checksums.values()) - len(finished) if corpus_checksum is not None else 0,
    )


def _peers(budget: Budget, alike: Iterable[tuple[Study, list[Job]]], finished: Mapping[str, Record]) -> Peers:
    """The runs that were made alike under a budget: by seed for each variant of any study, once where studies share it."""
    found: dict[str, dict[int, Record]] = {}
    for study, jobs in alike:
        same = {one.name for one in study.budgets if one.section == budget.section}
        for job in jobs:
            if job.run.budget.name in same and job.fingerprint in finished:
                variant = fingerprint(job.shaped.recipe, without="seed")
                found.setdefault(variant, {})[job.run.seed] = finished[job.fingerprint]
    return tuple(found.values())


def beside_others(records: Iterable[Record]) -> set[tuple[str, str]]:
    """Runs that shared their device with others, by what is known of them: several processes at their beginning or end, or
    another run on such a device in the meantime, which a process that came and went leaves no other trace of. Two machines
    of one kind look like one, so that a rate is missed rather than told wrongly."""
    spans: dict[tuple[str, str], tuple[str, float, float]] = {}
    found = set()
    for record in records:
        if record.get("processes", 1) > 1:
            found.add(identity(record))
        if record["status"] == "finished":
            end = datetime.fromisoformat(record["date"]).timestamp()
            spans[identity(record)] = record["environment"]["device"], end - _seconds_before(record), end
    for one, (device, begin, end) in spans.items():
        others = (span for key, span in spans.items() if key != one and span[0] == device)
        if any(begin + TOUCH < its_end and its_begin + TOUCH < end for _, its_begin, its_end in others):
            found.add(one)
    return found


def _seconds_before(record: Record) -> float:
    """How long before its end a run began. A branch was trained for `seconds` in all, the plateau of the smaller budget
    included, which another run made before; records up to 2026-11-19 have only that."""
    return float(record.get("process_seconds") or record.get("seconds") or 0)


def _spread(peers: Peers, metric: str) -> list[BySeed]:
    """Of all variants that have the metric, without those that have the same by any seed, such as the balance of a random
    router: they would say that chance does nothing to the others either."""
    found = [values for runs in peers if (values := metric_by_seed(runs, metric))]
    return [values for values in found if len(values) == 1 or len({*values.values()}) > 1]


def _row(
    study: Study,
    variant: Variant,
    budget: Budget,
    first: dict[Any, Job],
    made: dict[Any, dict[int, Record]],
    peers: Peers,
    shared: set[tuple[str, str]],
) -> Row:
    base = study.baseline_of(variant)
    same = base.name == variant.name
    one, other = (metric_by_seed(made[each.name, budget.name], "loss") for each in (variant, base))
    records = made[variant.name, budget.name]
    return Row(
        variant=variant,
        budget=budget,
        job=first[variant.name, budget.name],
        records=records,
        alone=tuple(seed for seed, record in records.items() if identity(record) not in shared),
        against=None if same else difference(one, other, _spread(peers, "loss")),
        is_baseline=same,
    )


def judge(study: Study, claim: Claim, rows: Iterable[Row], peers: Mapping[str, Peers]) -> list[Judged]:
    """A claim under each of its budgets, at each place of the other axes or for the best of each side."""
    found = []
    for budget in study.budgets:
        if claim.budgets and budget.name not in claim.budgets:
            continue
        values = {row.variant.name: row.by_seed(claim.metric) for row in rows if row.budget.name == budget.name}
        spread = _spread(peers[budget.name], claim.metric)
        for one, other in _pairs(study, claim, values):
            complete = not claim.best or _common_seeds(study, claim, values)  # the best of a part is not the best
            gap = difference(values[one], values[other], spread) if complete else None
            found.append(verdict_on(claim, budget.name, one, other, gap))
    return found


def verdict_on(claim: Claim, budget: str, one: str, other: str, found: Difference | None) -> Judged:
    """A claim that the first is lower, or with `within` that they differ by less."""
    bounds = (-claim.within, claim.within) if claim.within else (-math.inf, 0.0)
    verdict, p = decide(found, *bounds), p_value(found, *bounds)
    return Judged(claim=claim, budget=budget, one=one, other=other, found=found, verdict=verdict, p=p)


def adjusted(judged: Iterable[Judged]) -> tuple[Judged, ...]:
    """The same comparisons of a study, with p values that are adjusted for all of them being tested."""
    found = tuple(judged)
    p_values = holm([each.p for each in found])
    return tuple(replace(each, p=p) for each, p in zip(found, p_values, strict=True))


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
    if not counts["confirmed"] and not counts["refuted"]:
        return "not resolved at this scale"
    told = ", ".join(f"{counts[verdict]} {word}" for verdict, word in SHORT.items() if counts[verdict])
    return f"not resolved at this scale ({told})"


def remaining(judged: Iterable[Judged]) -> str:
    """How many of the settings that decide a claim do so where all comparisons of its study are tested together."""
    decided = [each for each in judged if each.decided]
    return f"{sum(each.remains for each in decided)} of {len(decided)}" if decided else "-"


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
