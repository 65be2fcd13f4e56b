"""The adaptive threshold: its fit against known distributions, its rule against a plain search, and its file."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.decode import threshold as module
from fathomlm.decode.threshold import GRID, PUBLIC, ThresholdEstimator, ThresholdOptions
from fathomlm.decode.threshold_samples import BINS, CLIP, Beta, Samples
from fathomlm.errors import CheckpointError, OptionError, OutputError

Draw = Callable[[random.Random], float]
SAME = [0.1 + 0.02 * at for at in range(40)]
"""For both classes: the confidence then says nothing."""


def beta(alpha: float, b: float) -> Draw:
    return lambda generator: generator.betavariate(alpha, b)


THESIS = ThresholdOptions(rule="thesis")


def thesis(**options: Any) -> ThresholdEstimator:
    return ThresholdEstimator(ThresholdOptions(**({"rule": "thesis"} | options)))


def feed(estimator: ThresholdEstimator, agree: list[float], disagree: list[float]) -> ThresholdEstimator:
    estimator.observe(agree, [True] * len(agree))
    estimator.observe(disagree, [False] * len(disagree))
    estimator.end_sequence()
    return estimator


def fed(agree: Draw, disagree: Draw, counts: tuple[int, int] = (2000, 2000), **options: Any) -> ThresholdEstimator:
    generator = random.Random(1)
    samples = [[draw(generator) for _ in range(count)] for draw, count in zip((agree, disagree), counts, strict=True)]
    return feed(thesis(**options), *samples)


def slow_posterior(c: float, agree: Beta, disagree: Beta, prior: float = 0.5) -> float:
    """As the thesis writes it, with Gamma functions; for small parameters."""
    c = min(max(c, CLIP), 1 - CLIP)
    densities = []
    for each in (agree, disagree):
        scale = math.gamma(each.alpha + each.beta) / (math.gamma(each.alpha) * math.gamma(each.beta))
        densities.append(scale * c ** (each.alpha - 1) * (1 - c) ** (each.beta - 1))
    return prior * densities[0] / (prior * densities[0] + (1 - prior) * densities[1])


@pytest.mark.parametrize(("alpha", "b"), [(0.5, 0.5), (1.0, 3.0), (6.0, 0.8), (40.0, 25.0)])
def test_a_beta_is_found_again_from_its_samples(alpha: float, b: float) -> None:
    generator, samples = random.Random(0), Samples()
    for _ in range(40_000):
        samples.add(generator.betavariate(alpha, b))
    assert samples.fit().alpha == pytest.approx(alpha, rel=0.04)
    assert samples.fit().beta == pytest.approx(b, rel=0.04)


def test_moments_are_those_of_all_samples_at_once() -> None:
    """Also where all lie close together: sums of squares would lose every digit there."""
    generator = random.Random(2)
    values = [0.7 + 1e-9 * generator.random() for _ in range(1000)]
    samples = Samples()
    for value in values:
        samples.add(value)
    mean = math.fsum(values) / len(values)
    assert samples.mean == pytest.approx(mean, rel=1e-14)
    assert samples.variance == pytest.approx(math.fsum((value - mean) ** 2 for value in values) / len(values), rel=1e-6)


def test_a_beta_has_the_moments_it_was_made_from() -> None:
    made = Beta.of_moments(0.3, 0.02)
    total = made.alpha + made.beta
    assert made.alpha / total == pytest.approx(0.3)
    assert made.alpha * made.beta / (total**2 * (total + 1)) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("mean", "variance"),
    [(0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 0.25), (0.5, 3.0), (1.0, 0.1), (0.3, 5e-324), (0.9, 1e-13)],
)
def test_moments_that_no_beta_has_give_finite_parameters(mean: float, variance: float) -> None:
    made = Beta.of_moments(mean, variance)
    assert 0 < made.alpha <= 1e6
    assert 0 < made.beta <= 1e6
    assert made.alpha / (made.alpha + made.beta) == pytest.approx(mean, abs=1.01 * CLIP)
    assert all(math.isfinite(made.density(c)) for c in (0.0, CLIP, 0.5, 1.0))


@pytest.mark.parametrize("parameters", [(3.0, 0.8), (2.0, 9.0), (300.0, 700.0)])
def test_a_density_has_area_one(parameters: tuple[float, float]) -> None:
    made = Beta(alpha=parameters[0], beta=parameters[1])
    area = sum(made.density((at + 0.5) / 20_000) for at in range(20_000)) / 20_000
    assert area == pytest.approx(1, abs=2e-3)


def test_density_and_posterior_are_the_formulas() -> None:
    for priors, prior in (("equal", 0.5), ("measured", 3001 / 4002)):
        estimator = fed(beta(3, 0.8), beta(1, 2.5), (3000, 1000), priors=priors)
        agree, disagree = estimator.agree.fit(), estimator.disagree.fit()
        for c in (0.0, 0.1, 0.5, 0.93, 1.0):
            assert estimator.posterior(c) == pytest.approx(slow_posterior(c, agree, disagree, prior), rel=1e-9)
            assert estimator.density(True, c) == agree.density(c)
            assert estimator.density(False, c) == disagree.density(c)


def test_a_typical_stream_gets_a_threshold_between_its_classes() -> None:
    estimator = fed(beta(3, 0.8), beta(1, 2.5))
    truth = next(
        at / GRID for at in range(GRID) if slow_posterior(at / GRID, Beta(alpha=3, beta=0.8), Beta(alpha=1, beta=2.5)) >= 0.4
    )
    assert estimator.threshold == pytest.approx(truth, abs=0.02)
    assert 0.3 < truth < 0.7


def test_the_smallest_from_which_the_posterior_stays() -> None:
    """Agreements at both ends, disagreements in the middle: the posterior is high, low and high again."""
    estimator = fed(beta(0.6, 0.4), beta(5, 5))
    agree, disagree = estimator.agree.fit(), estimator.disagree.fit()
    holds = [slow_posterior(at / GRID, agree, disagree) >= 0.4 for at in range(GRID + 1)]
    assert sum(a != b for a, b in itertools.pairwise(holds)) == 2
    assert holds[0]
    assert holds[-1]
    staying = [at for at in range(GRID + 1) if all(holds[at:])]
    assert estimator.threshold == staying[0] / GRID
    assert estimator.threshold > 0.5


def test_a_posterior_that_is_low_at_the_upper_end_lets_nothing_exit() -> None:
    estimator = fed(beta(5, 5), beta(0.6, 0.4))
    assert estimator.posterior(0.5) > 0.4 > estimator.posterior(1.0)
    assert estimator.threshold == 1.0


def test_a_posterior_that_is_low_everywhere_lets_nothing_exit() -> None:
    estimator = feed(thesis(priors="measured"), SAME, SAME * 100)
    assert all(estimator.posterior(at / GRID) < 0.4 for at in range(GRID + 1))
    assert estimator.threshold == 1.0


def test_a_posterior_that_is_high_everywhere_lets_everything_exit() -> None:
    estimator = feed(thesis(priors="measured"), SAME * 100, SAME)
    assert all(estimator.posterior(at / GRID) >= 0.4 for at in range(GRID + 1))
    assert estimator.threshold == 0.0


def samples_of(alpha: float, b: float) -> Samples:
    total = alpha + b
    mean = alpha / total
    return Samples(count=100, mean=mean, m2=100 * mean * (1 - mean) / (total + 1), bins=[100] + [0] * (BINS - 1))


def test_both_ends_of_the_grid_are_looked_at() -> None:
    low = ThresholdEstimator(THESIS, agree=samples_of(1.055, 1), disagree=samples_of(1, 1))
    low.end_sequence()
    assert low.posterior(0.0) < 0.4 < low.posterior(1 / GRID)
    assert low.threshold == 1 / GRID
    high = ThresholdEstimator(THESIS, agree=samples_of(1, 1.055), disagree=samples_of(1, 1))
    high.end_sequence()
    assert high.posterior(1.0) < 0.4 < high.posterior(1 - 1 / GRID)
    assert high.threshold == 1.0


def test_a_higher_condition_gives_a_higher_threshold() -> None:
    values = [fed(beta(3, 0.8), beta(1, 2.5), condition=condition).threshold for condition in (0.1, 0.4, 0.7, 0.95)]
    assert values == sorted(set(values))


def test_classes_that_are_far_apart_and_all_equal_do_not_overflow() -> None:
    estimator = feed(thesis(), [0.9] * 50, [0.2] * 50)
    assert estimator.agree.fit().alpha > 1e5
    assert 0.2 < estimator.threshold < 0.9
    assert (estimator.posterior(0.2), estimator.posterior(0.9)) == (0.0, 1.0)


@pytest.mark.parametrize("agreements", [0, 2, 9])
def test_the_threshold_goes_up_when_everything_disagrees(agreements: int) -> None:
    estimator = thesis()
    feed(estimator, [0.95] * agreements, [0.97] * 50)
    assert estimator.threshold == 1.0
    feed(estimator, [], [0.97] * 50)
    assert estimator.threshold == 1.0


LAWS: dict[str, Draw] = {
    "uniform": lambda generator: generator.random(),
    "high": beta(8, 1),
    "low": beta(0.5, 8),
    "both ends": beta(0.1, 0.1),
    "all equal": lambda generator: 0.5,
    "all 1": lambda generator: 1.0,
    "all 0": lambda generator: 0.0,
    "0 or 1": lambda generator: float(generator.random() < 0.5),
}


@pytest.mark.parametrize("priors", ["equal", "measured"])
@pytest.mark.parametrize("agreements", [10, 50, 200, 300])
@pytest.mark.parametrize("law", list(LAWS))
def test_nothing_exits_where_the_confidence_says_nothing_and_most_disagree(law: str, agreements: int, priors: str) -> None:
    """Classes that look alike: by equal priors each confidence is half likely to agree, also where 1 in 100 does."""
    estimator = fed(LAWS[law], LAWS[law], (agreements, 1000 - agreements), priors=priors)
    generator = random.Random(2)
    assert sum(LAWS[law](generator) > estimator.threshold for _ in range(1000)) <= 10


def test_ten_agreements_in_a_thousand_let_nothing_exit() -> None:
    confidences = [0.0005 + at / 1000 for at in range(1000)]
    agree = confidences[50::100]
    disagree = [c for c in confidences if c not in agree]
    estimator = feed(thesis(), agree, disagree)
    assert all(estimator.posterior(at / GRID) > 0.4 for at in range(GRID + 1))  # by equal priors
    assert estimator.threshold == 1.0


def test_few_agreements_that_are_sure_still_exit() -> None:
    """Nearly everything disagrees, but not at all confidences: what is above the threshold did agree."""
    estimator = fed(beta(60, 1), beta(1, 12), (60, 940))
    assert 0.3 < estimator.threshold < 0.95


def test_the_threshold_is_raised_to_where_enough_agreed() -> None:
    """By equal priors it lies where half as many agreed; the counts move it up to the first bin from which on enough did."""
    estimator = fed(beta(6, 1), beta(1.5, 1.5), (300, 1700))
    raised = round(estimator.threshold * BINS)
    assert estimator.threshold == raised / BINS < 1
    smallest = next(
        at / GRID for at in range(GRID) if all(estimator.posterior(c / GRID) >= 0.4 for c in range(at, GRID + 1))
    )
    assert smallest < estimator.threshold
    shares = [
        sum(estimator.agree.bins[at:]) / (sum(estimator.agree.bins[at:]) + sum(estimator.disagree.bins[at:]))
        for at in range(int(smallest * BINS), BINS)
    ]
    assert shares[raised - int(smallest * BINS)] >= 0.4
    assert all(share < 0.4 for share in shares[: raised - int(smallest * BINS) - 1])


def test_a_fit_that_promises_what_was_not_seen_is_not_believed() -> None:
    """Disagreements of two kinds: the Beta of their mean and variance knows nothing of how many are at 0.85."""
    generator = random.Random(3)
    agree, disagree = [generator.betavariate(9, 0.5) for _ in range(400)], [0.3] * 3000 + [0.85] * 3000
    estimator = feed(thesis(), agree, disagree)
    smallest = next(
        at / GRID for at in range(GRID) if all(estimator.posterior(c / GRID) >= 0.4 for c in range(at, GRID + 1))
    )
    assert smallest < 0.85 < estimator.threshold < 1


@pytest.mark.parametrize("priors", ["equal", "measured"])
@pytest.mark.parametrize("condition", [0.1, 0.4, 0.7, 0.95])
def test_the_public_rule_is_the_thesis_rule_over_ten_candidates(condition: float, priors: str) -> None:
    kind = {"condition": condition, "priors": priors}
    found = fed(beta(3, 0.8), beta(1, 2.5), rule="public", **kind)
    assert found.threshold == next(c for c in PUBLIC if c >= fed(beta(3, 0.8), beta(1, 2.5), **kind).threshold)
    assert (len(PUBLIC), PUBLIC[0], PUBLIC[-1]) == (10, 0.3, 0.9)


def test_the_public_rule_never_goes_below_its_first_candidate_nor_stops_at_its_last() -> None:
    """Everything may exit: the thesis' rule says 0. Nothing may: at 0.9 some would still exit."""
    easy, hard = feed(thesis(priors="measured"), SAME * 100, SAME), fed(beta(5, 5), beta(0.6, 0.4))
    assert (easy.threshold, easy.by("public")) == (0.0, 0.3)
    assert hard.posterior(0.9) < 0.4
    assert hard.by("public") == 1.0


def test_a_false_alarm_ends_when_agreements_come() -> None:
    estimator = feed(thesis(), [], [0.1 + 0.01 * at for at in range(20)])
    assert estimator.threshold == 1.0
    feed(estimator, [0.7 + 0.01 * at for at in range(30)], [])
    assert 0.2 < estimator.threshold < 0.75


@pytest.mark.parametrize(("agreements", "disagreements"), [(0, 0), (500, 0), (500, 9), (9, 9), (9, 36), (0, 9), (9, 10)])
def test_the_value_is_held_while_a_class_is_short(agreements: int, disagreements: int) -> None:
    estimator = thesis(initial=0.8)
    feed(estimator, [0.9] * agreements, [0.3] * disagreements)
    assert estimator.threshold == 0.8
    assert [refit.threshold for refit in estimator.history] == [0.8]


def test_the_value_changes_once_both_classes_have_enough() -> None:
    estimator = feed(thesis(least=3), [0.8, 0.9, 0.95], [0.1, 0.3])
    assert estimator.threshold == 0.9
    feed(estimator, [], [0.2])
    assert 0.3 < estimator.threshold < 0.8


@pytest.mark.parametrize(("expected", "calibrating"), [(1, 1), (33, 1), (66, 1), (67, 2), (100, 3), (299, 8), (10_000, 300)])
def test_three_percent_of_the_sequences_calibrate(expected: int, calibrating: int) -> None:
    estimator = thesis(expected_sequences=expected)
    for at in range(min(expected, calibrating + 2)):
        assert estimator.calibrating == (at < calibrating)
        estimator.end_sequence()
    assert [refit.sequence for refit in estimator.history] == list(range(1, calibrating + 1))


def test_after_calibration_nothing_changes_but_the_count() -> None:
    estimator = thesis(calibrating_sequences=2)
    for _ in range(2):
        feed(estimator, [0.8, 0.9] * 5, [0.2, 0.3] * 5)
    before = copy.deepcopy(estimator)
    feed(estimator, [], [0.99] * 500)
    assert estimator.sequences == 3
    estimator.sequences = 2
    assert estimator == before


def test_without_a_number_every_sequence_calibrates() -> None:
    estimator = thesis()
    for _ in range(50):
        estimator.end_sequence()
    assert estimator.calibrating
    assert len(estimator.history) == 50


def test_only_the_latest_refits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 4)
    estimator = thesis()
    for _ in range(6):
        estimator.end_sequence()
    assert [refit.sequence for refit in estimator.history] == [3, 4, 5, 6]


def test_history_says_what_was_known() -> None:
    estimator = thesis()
    feed(estimator, [0.8, 0.9], [0.1])
    feed(estimator, [0.7], [])
    first, second = estimator.history
    assert (first.sequence, first.agreements, first.disagreements) == (1, 2, 1)
    assert (second.sequence, second.agreements, second.disagreements) == (2, 3, 1)
    assert (first.agree.alpha, first.agree.beta) == pytest.approx((42.5, 7.5))
    assert (second.agree, second.disagree, second.threshold) == (estimator.agree.fit(), first.disagree, estimator.threshold)


def test_how_samples_are_handed_over_makes_no_difference() -> None:
    generator = random.Random(5)
    samples = [(generator.random(), generator.random() < 0.5) for _ in range(100)]
    at_once, singly = thesis(), thesis()
    at_once.observe([c for c, _ in samples], [agreed for _, agreed in samples])
    for c, agreed in samples:
        singly.observe([c], [agreed])
    assert at_once == singly


def test_the_histogram_has_both_ends() -> None:
    estimator = thesis()
    estimator.observe([0.0, 0.019, 0.021, 0.5, 1.0, 1.004], [True] * 6)
    expected = [0] * BINS
    for at, count in ((0, 2), (1, 1), (25, 1), (49, 2)):
        expected[at] = count
    assert estimator.agree.bins == expected
    assert estimator.disagree.count == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.2, 1.2])
def test_what_is_no_confidence_is_refused_and_nothing_taken_in(bad: float) -> None:
    estimator = thesis()
    with pytest.raises(OptionError, match="confidence must be between 0 and 1"):
        estimator.observe([0.5, bad], [True, True])
    assert estimator == thesis()


def test_every_confidence_needs_an_agreement() -> None:
    with pytest.raises(OptionError, match="got 1 for 2"):
        thesis().observe([0.5, 0.6], [True])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 1.1}, "initial must be between 0 and 1, got 1.1"),
        ({"condition": math.nan}, "condition must be"),
        ({"condition": "0.4"}, "condition must be"),
        ({"priors": "eqal"}, "did you mean 'equal'"),
        ({"least": 1}, "least must be >= 2, got 1"),
        ({"least": 2.5}, "least must be an integer"),
        ({"expected_sequences": 0}, "expected_sequences must be"),
        ({"calibrating_sequences": True}, "calibrating_sequences must be"),
        ({"expected_sequences": 100, "calibrating_sequences": 3}, "cannot be combined"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ThresholdOptions(**options)


def test_a_saved_estimator_goes_on_as_if_it_never_was(tmp_path: Path) -> None:
    generator, path = random.Random(3), tmp_path / "threshold.json"
    kept = thesis(calibrating_sequences=12, priors="measured", least=5)
    saved = copy.deepcopy(kept)
    for _ in range(15):
        agreed = [generator.random() < 0.7 for _ in range(9)]
        confidences = [generator.betavariate(3, 0.8) if each else generator.betavariate(1, 2.5) for each in agreed]
        for estimator in (kept, saved):
            estimator.observe(confidences, agreed)
            estimator.end_sequence()
        saved.save(path)
        saved = ThresholdEstimator.load(path)
        assert saved == kept
    assert len(saved.history) == 12
    assert len({refit.threshold for refit in saved.history}) > 3
    assert [each.name for each in tmp_path.iterdir()] == ["threshold.json"]


def test_a_record_and_its_estimator_do_not_share_anything() -> None:
    record = fed(beta(3, 0.8), beta(1, 2.5)).to_dict()
    before = copy.deepcopy(record)
    feed(ThresholdEstimator.from_dict(record), [0.5], [0.5])
    assert record == before


def change(record: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    for step in way:
        record = record[int(step)] if isinstance(record, list) else record[step]
    record[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 3, "has format 3; this version reads 2 and 1"),
        ("format", True, "has format true"),
        ("extra", 1, "unknown field 'extra'"),
        ("sequences", -1, "sequences must be >= 0, got -1"),
        ("history", {}, "history must be a list"),
        ("history.0.threshold", 1.5, r"history\[0\]\.threshold must be between 0 and 1, got 1.5"),
        ("history.0.agree.alpha", 0, r"history\[0\]\.agree\.alpha must be >="),
        ("history.0.agree", None, r"history\[0\]\.agree must be a section of fields, got null"),
        ("options.priors", [], "options.priors must be a string"),
        ("options.treshold", 1, "unknown field in options 'treshold'"),
        ("agree.mean", 2.0, "agree.mean must be between 0 and 1"),
        ("agree.mean", math.nan, "agree.mean must be a number"),
        ("agree.m2", math.inf, "agree.m2 must be a number"),
        ("agree.count", 10**400, "agree.bins must be counts that sum to 1"),
        ("agree.count", 3, "agree.bins must be counts that sum to 3"),
        ("agree.bins", [2000], "agree.bins must be a list of 50 counts"),
        ("agree.bins", [2001, -1] + [0] * 48, "agree.bins must be >= 0, got -1"),
        ("disagree", {"count": 0, "mean": 0.5, "m2": 0.0, "bins": [0] * 50}, "mean and m2 must be 0 without samples"),
    ],
)
def test_a_record_with_a_bad_value_is_refused(path: str, value: Any, message: str) -> None:
    record = fed(beta(3, 0.8), beta(1, 2.5)).to_dict()
    change(record, path, value)
    with pytest.raises(CheckpointError, match=message):
        ThresholdEstimator.from_dict(record)


@pytest.mark.parametrize("part", ["", "options", "agree", "history.0", "history.0.disagree"])
def test_a_record_that_lacks_a_field_is_refused(part: str) -> None:
    good = fed(beta(3, 0.8), beta(1, 2.5)).to_dict()
    inside = good
    for step in filter(None, part.split(".")):
        inside = inside[int(step)] if isinstance(inside, list) else inside[step]
    for name in list(inside):
        value = inside.pop(name)
        with pytest.raises(CheckpointError, match=name):
            ThresholdEstimator.from_dict(good)
        inside[name] = value
    assert isinstance(ThresholdEstimator.from_dict(good), ThresholdEstimator)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\udcff", "[" * 100_000, '{"format": ' + "9" * 5000 + "}"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"bad\.json is not a saved threshold estimator"):
        ThresholdEstimator.load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        ThresholdEstimator.load(tmp_path / "none.json")


def test_saving_keeps_the_old_file_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "threshold.json"
    thesis().save(path)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OutputError, match="No space left"):
        fed(beta(3, 0.8), beta(1, 2.5)).save(path)
    assert json.loads(path.read_text())["sequences"] == 0
