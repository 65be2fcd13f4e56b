"""From records to verdicts, on numbers that were made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.results import Results, beside_others, collect, overall, remaining
from fathomlm.lab.study.spec import Study, build_study
from lab.study.synthetic import fill, record_of

Values = Callable[..., dict[str, Any]]
SEEDS = [0, 1, 2]
"""As many as give three variants four degrees of freedom."""
NOISE = (0.001, -0.002, 0.0015, 0.0, -0.001, 0.002)


def noise(job: Job) -> float:
    """Each seed's own luck, and a little of each run's."""
    return 0.3 * job.run.seed + NOISE[(3 * job.run.seed + len(job.run.variant.name)) % len(NOISE)]


def results(study: Study, place: Path, loss: Callable[[Job], float | None]) -> Results:
    ledger = Ledger(place)
    fill(study, ledger, loss)
    return collect(study, ledger.all())


def verdict(found: Results, number: int = 0) -> str:
    return overall([each for each in found.judged if each.claim is found.study.claims[number]])


LEVELS = {"plain": 3.0, "recursive": 3.1, "mor": 3.001}


def test_an_order_is_called_where_the_interval_says_so(values: Values, tmp_path: Path) -> None:
    claims = [
        {"text": "a", "lower": "plain", "higher": "recursive"},
        {"text": "b", "lower": "recursive", "higher": "plain"},
        {"text": "c", "lower": "plain", "higher": "mor"},
        {"text": "d", "same": ["plain", "mor"], "within": 0.05},
        {"text": "e", "same": ["plain", "recursive"], "within": 0.05},
    ]
    study = build_study(values(claims=claims, seeds=SEEDS), "test")
    found = results(study, tmp_path, lambda job: LEVELS[job.run.variant.name] + noise(job))
    words = [verdict(found, number) for number in range(5)]
    assert words == ["confirmed", "refuted", "not resolved at this scale", "confirmed", "refuted"]
    rows = {row.variant.name: row for row in found.rows}
    assert rows["plain"].is_baseline
    assert rows["recursive"].against is not None
    assert rows["recursive"].against.mean == pytest.approx(0.1, abs=0.01)
    assert rows["recursive"].against.half is not None
    assert rows["recursive"].against.half < 0.05, "the seeds' own luck is not in it"


def test_one_seed_gives_no_interval_and_no_order(values: Values, tmp_path: Path) -> None:
    found = results(build_study(values(seeds=[0]), "test"), tmp_path, lambda job: LEVELS[job.run.variant.name])
    assert verdict(found) == "not resolved at this scale"
    assert all(row.against is None or row.against.half is None for row in found.rows)


def test_the_spread_is_that_of_all_studies_that_were_made_alike(values: Values, tmp_path: Path) -> None:
    looped = {"model": {"sharing": "middle-cycle", "recursions": 2}}
    one = build_study(values(seeds=[0]), "test")
    rates = {f"rate-{rate}": {"optimizer": {"lr": rate}} for rate in (0.1, 0.2, 0.3)}
    more = {"name": "more", "variants": {"plain": {}, "recursive": looped, **rates}, "baseline": "plain", "claims": []}
    alike = build_study(values(**more), "test")
    unlike = build_study(values(**more | {"common": values()["common"] | {"schedule": {"warmup": 3}}}), "test")
    levels = LEVELS | dict.fromkeys(rates, 3.2)
    for study in (one, alike, unlike):
        fill(study, Ledger(tmp_path), lambda job: levels[job.run.variant.name] + noise(job))
    records = Ledger(tmp_path).all()
    alone, with_unlike = (collect(one, records, others) for others in ((), (unlike,)))
    assert alone.judged == with_unlike.judged
    assert verdict(alone) == "not resolved at this scale"
    found = collect(one, records, (unlike, alike))
    assert verdict(found) == "confirmed"
    gap = found.judged[0].found
    assert gap is not None
    assert (gap.seeds, gap.freedom) == (1, 4), "plain and recursive are the same runs in both studies, and count once"


def test_what_was_not_run_is_said(values: Values, tmp_path: Path) -> None:
    study = build_study(values(), "test")
    assert verdict(collect(study, [])) == "not run yet"
    found = results(study, tmp_path, lambda job: 3.0 if job.run.variant.name == "plain" else None)
    assert verdict(found) == "not run yet"
    assert len(found.records) == 2


def test_a_claim_about_an_axis_is_tried_at_every_place_or_for_the_best(values: Values, tmp_path: Path) -> None:
    looped = {"model": {"sharing": "middle-cycle", "recursions": 2}}
    axes = {"rate": {"low": {}, "high": {"optimizer": {"lr": 0.1}}}, "kind": {"plain": {}, "recursive": looped}}
    claims = [{"text": "each", "lower": "plain", "higher": "recursive"}]
    claims += [{"text": "best", "lower": "plain", "higher": "recursive", "best": True}]
    study = build_study(values(variants=None, axes=axes, claims=claims, seeds=SEEDS), "test")
    level = {"low-plain": 3.0, "low-recursive": 3.2, "high-plain": 3.5, "high-recursive": 3.3}
    found = results(study, tmp_path, lambda job: level[job.run.variant.name] + noise(job))
    assert [(j.one, j.verdict) for j in found.judged] == [
        ("low-plain", "confirmed"), ("high-plain", "refuted"), ("low-plain", "confirmed"),
    ]  # fmt: skip
    assert verdict(found, 0) == "not resolved at this scale (1 confirmed, 1 refuted)"
    partly = results(study, tmp_path / "partly", lambda job: None if job.run.variant.name == "high-plain" else 3.0)
    assert verdict(partly, 1) == "not run yet", "the best of a part is not the best"


def test_runs_of_other_settings_or_another_corpus_do_not_count(values: Values, tmp_path: Path) -> None:
    study = build_study(values(), "test")
    jobs = jobs_of(study, Place(None, Path()))
    own = [record_of(job, 3.0) for job in jobs]
    foreign = [record | {"data": {"mark": "n"}} for record in own[:2]]
    other = build_study(values(common=values()["common"] | {"optimizer": {"lr": 0.5}}), "test")
    changed = [record_of(job, 9.0) for job in jobs_of(other, Place(None, Path()))]
    found = collect(study, [*changed, *own, *foreign, *own])
    assert len(found.records) == 6
    assert {record["loss"] for record in found.records} == {3.0}
    assert found.left_out == 2


def test_rates_are_of_runs_that_had_the_device_to_themselves(values: Values) -> None:
    """A run beside which another one began and ended counts one process at its own beginning and end."""
    study = build_study(values(seeds=[0]), "test")
    first, second, third = jobs_of(study, Place(None, Path()))

    def made(job: Job, minute: int, seconds: float, **more: object) -> dict[str, Any]:
        return record_of(job, 3.0, date=f"2026-11-16T12:{minute:02}:00+00:00", seconds=seconds, **more)

    long, within, later = made(first, 30, 1200.0), made(second, 20, 60.0, processes=2), made(third, 40, 600.0)
    assert beside_others([long, within, later]) == {(r["fingerprint"], "m") for r in (long, within)}
    rates = [row.rate for row in collect(study, [long, within, later]).rows]
    assert rates == [None, None, 1e6]
    elsewhere = within | {"environment": {"device": "another"}, "processes": 1}
    assert beside_others([long, elsewhere, later]) == set()
    assert beside_others([long, long | {"study": "another", "shared": "small"}]) == set(), "one run in two ledgers"
    branch = made(second, 31, 1200.0, process_seconds=60.5)  # its plateau is the first one's
    assert beside_others([long, branch, made(third, 41, 600.0)]) == set()


def test_failed_runs_are_listed(values: Values) -> None:
    study = build_study(values(), "test")
    jobs = jobs_of(study, Place(None, Path()))
    records = [record_of(job, 3.0) for job in jobs[1:]]
    records.append({**record_of(jobs[0], 0.0), "status": "failed", "reason": "not finite"})
    found = collect(study, records)
    assert [record["reason"] for record in found.failed] == ["not finite"]
    assert len(found.records) == 5


def test_a_metric_that_is_the_same_for_every_seed_says_nothing_of_the_spread(values: Values, tmp_path: Path) -> None:
    claims = [{"text": "balance", "lower": "plain", "higher": "recursive", "metric": "max_violation"}]
    study = build_study(values(claims=claims, seeds=SEEDS), "test")
    jobs = jobs_of(study, Place(None, Path()))

    def made(job: Job, by_construction: float) -> dict[str, Any]:
        value = LEVELS[job.run.variant.name] + noise(job) if job.run.variant.name != "mor" else by_construction
        return record_of(job, 3.0, final={"next_token": 3.0, "max_violation": value})

    found = collect(study, [made(job, 0.004) for job in jobs]).judged[0].found
    assert found is not None
    assert found.freedom == 2, "of two variants with three seeds"
    varied = collect(study, [made(job, 0.004 + noise(job)) for job in jobs]).judged[0].found
    assert varied is not None
    assert varied.freedom == 4


def test_comparisons_of_a_study_are_tested_together(values: Values, tmp_path: Path) -> None:
    claims = [{"text": f"claim {n}", "lower": "plain", "higher": "mor"} for n in range(9)]
    clear = {"text": "clear", "lower": "plain", "higher": "recursive"}
    level = {"plain": 3.0, "recursive": 3.1, "mor": 3.003}

    def judged(claims: list[dict[str, Any]], place: Path) -> Results:
        study = build_study(values(claims=claims, seeds=SEEDS), "test")
        return results(study, place, lambda job: level[job.run.variant.name] + noise(job))

    alone, many = judged([claims[0], clear], tmp_path / "alone"), judged([*claims, clear], tmp_path / "many")
    assert [each.verdict for each in alone.judged] == ["confirmed"] * 2
    assert [each.remains for each in alone.judged] == [True, True]
    assert {each.verdict for each in many.judged} == {"confirmed"}, "by itself each is what it was"
    assert [each.remains for each in many.judged] == [False] * 9 + [True]
    assert remaining(many.judged) == "1 of 10"
    assert remaining([]) == "-"
