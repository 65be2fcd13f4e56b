"""The threshold with a promise: sums against plain counting, the test against its formula, the promise in simulation."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from typing import Any

import pytest

from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.decode.threshold_samples import STEPS, Texts
from fathomlm.errors import CheckpointError, OptionError

Text = list[tuple[float, bool]]
EDGES = [0.0, 0.005, 0.07, 0.3, 0.995, 1.0, 1.004]


def texts_of(several: list[Text]) -> Texts:
    texts = Texts()
    for text in several:
        for confidence, agreed in text:
            texts.add(confidence, agreed)
        texts.end()
    return texts


def at_random(generator: random.Random, many: int) -> list[Text]:
    """Of several lengths, some of their confidences at the thresholds themselves."""
    texts = []
    for _ in range(many):
        right = generator.random()
        drawn = [generator.random() for _ in range(20)] + EDGES
        values = generator.choices(drawn, k=generator.randrange(1, 30))
        texts.append([(value, generator.random() < right) for value in values])
    return texts


def wrong(text: Text, threshold: float) -> int:
    return sum((confidence > threshold or threshold == 0) and not agreed for confidence, agreed in text)


def test_sums_are_what_plain_counting_gives() -> None:
    several = at_random(random.Random(0), 40)
    texts = texts_of(several)
    sizes = [len(text) for text in several]
    assert (texts.count, texts.tokens) == (40, sum(sizes))
    for at in range(STEPS):
        threshold = at / STEPS
        counts = [wrong(text, threshold) for text in several]
        p = sum(counts) / sum(sizes)
        assert texts.share(at) == p
        exits = [confidence > threshold or threshold == 0 for text in several for confidence, _ in text]
        assert texts.exiting(at) == statistics.fmean(exits)
        if 0 < p < 1:
            # Of the ratio of two sums over texts, beside that of as many independent tokens.
            variance = 40 / 39 * sum((c - p * n) ** 2 for c, n in zip(counts, sizes, strict=True)) / sum(sizes) ** 2
            assert texts.effective(at) == pytest.approx(min(sum(sizes), p * (1 - p) / variance))
    assert (texts.share(STEPS), texts.exiting(STEPS)) == (0, 0)


def test_the_p_value_and_the_bound_are_the_formula() -> None:
    texts = texts_of([[(0.5, i % 5 > 0) for i in range(50)]] * 20)  # every text alike: 200 of 1,000, no clustering
    assert texts.effective(0) == 1000
    divergence = 0.2 * math.log(0.2 / 0.25) + 0.8 * math.log(0.8 / 0.75)
    assert texts.p_value(0, 0.25) == pytest.approx(math.exp(-1000 * divergence))
    assert texts.p_value(0, 0.2) == texts.p_value(0, 0.1) == 1
    for level in (0.5, 0.95, 0.999):
        bound = texts.bound(0, level)
        assert bound > 0.2
        assert texts.p_value(0, bound) == pytest.approx(1 - level, rel=1e-6)


@pytest.mark.parametrize("risk", [0.02, 0.1, 0.3, 0.9])
def test_the_threshold_is_the_smallest_down_to_which_all_bounds_are_below_the_risk(risk: float) -> None:
    texts = texts_of(at_random(random.Random(1), 120))
    below = [texts.bound(at, 0.9) <= risk for at in range(STEPS)]
    wanted = next((at for at in range(STEPS) if all(below[at:])), STEPS)
    assert texts.threshold(risk, 0.9) == wanted / STEPS


def test_texts_that_err_together_say_less_than_their_tokens() -> None:
    """As many wrong tokens in the same texts: spread over all of them, or in a few."""
    spread = texts_of([[(0.9, at > 0) for at in range(50)]] * 40)
    few = texts_of([[(0.9, at > 9) for at in range(50)] if i % 10 == 0 else [(0.9, True)] * 50 for i in range(40)])
    assert spread.share(0) == few.share(0) == 0.02
    assert few.effective(0) < 0.2 * spread.effective(0)
    assert few.bound(0, 0.95) > 1.5 * spread.bound(0, 0.95)


@pytest.mark.parametrize(("tokens", "threshold"), [(29, 1.0), (30, 0.0)])
def test_without_a_wrong_token_299_tokens_are_enough_for_one_percent(tokens: int, threshold: float) -> None:
    assert texts_of([[(0.2, True)] * tokens] * 10).threshold(0.01, 0.95) == threshold


def calibrated(generator: random.Random, texts: int) -> Texts:
    """Confidences are uniform; a text errs everywhere as its own rate says, which is 0.2 on average and mostly below it."""
    several = []
    for _ in range(texts):
        rate = generator.betavariate(0.5, 2)
        several.append([(c := generator.random(), generator.random() >= rate * (1 - c)) for _ in range(50)])
    return texts_of(several)


def true_share(threshold: float) -> float:
    """Of tokens that are wrong: the integral of 0.2 (1 - c) above the threshold."""
    return 0.1 * (1 - threshold) ** 2


def test_the_promise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 95 of 100 calibrations, and not where tokens count as independent though texts are the units."""
    generator, runs = random.Random(4), 150
    found = [calibrated(generator, 30) for _ in range(runs)]
    kept = [true_share(texts.threshold(0.03, 0.95)) for texts in found]
    assert sum(share > 0.03 for share in kept) <= 0.05 * runs
    assert statistics.median(kept) > 0.01  # careful, and still of use
    monkeypatch.setattr(Texts, "effective", lambda self, at: float(self.tokens))
    assert sum(true_share(texts.threshold(0.03, 0.95)) > 0.03 for texts in found) > 0.05 * runs


def fed(texts: int, **options: Any) -> ThresholdEstimator:
    generator, estimator = random.Random(5), ThresholdEstimator(ThresholdOptions(**options))
    for text in at_random(generator, texts):
        estimator.observe([min(c, 1.0) for c, _ in text], [agreed for _, agreed in text])
        estimator.end_sequence()
    return estimator


def test_nothing_exits_before_there_are_enough_texts() -> None:
    values = [refit.threshold for refit in fed(60, risk=0.3, level=0.8).history]
    assert values[:29] == [1.0] * 29
    assert values[29] < 1
    assert fed(29, risk=0.3, level=0.8, initial=0.6).threshold == 0.6


def test_calibrations_of_earlier_versions_with_few_texts_promise_nothing() -> None:
    """Ten were enough then."""
    estimator = fed(29, risk=0.3, level=0.8, calibrating_sequences=29)
    estimator.history[-1] = dataclasses.replace(estimator.history[-1], threshold=0.1)
    again = ThresholdEstimator.from_dict(estimator.to_dict())
    assert (again.threshold, again.calibrating) == (1.0, False)
    assert again.for_drafts().threshold == again.by("thesis")


def test_calibration_goes_on_where_sequences_had_no_tokens() -> None:
    estimator = ThresholdEstimator(ThresholdOptions(expected_sequences=100, risk=0.9))
    for number in range(40):
        if number % 4:
            estimator.observe([0.5, 0.6], [True, False])
        estimator.end_sequence()
    assert (estimator.sequences, estimator.texts.count, estimator.calibrating) == (40, 30, False)
    assert estimator.threshold < 1


@pytest.mark.parametrize(("expected", "calibrating"), [(1, 30), (1000, 30), (1100, 33)])
def test_calibration_does_not_end_before_there_are_enough_texts(expected: int, calibrating: int) -> None:
    assert len(fed(calibrating + 5, expected_sequences=expected).history) == calibrating


def test_a_smaller_risk_and_a_higher_level_give_higher_thresholds() -> None:
    by_risk = [fed(200, risk=risk).threshold for risk in (0.4, 0.2, 0.1)]
    by_level = [fed(200, risk=0.2, level=level).threshold for level in (0.5, 0.95, 0.9999)]
    assert by_risk == sorted(set(by_risk))
    assert by_level == sorted(set(by_level))


def test_texts_without_tokens_do_not_count() -> None:
    estimator = fed(12, risk=0.3)
    before = estimator.texts.count
    estimator.end_sequence()
    assert (estimator.sequences, estimator.texts.count) == (13, before)


def test_every_rule_reads_the_same_samples() -> None:
    risk, thesis = fed(100, risk=0.2), fed(100, rule="thesis")
    assert risk.by("thesis") == thesis.threshold == risk.for_drafts().threshold
    assert thesis.by("risk") == fed(100).threshold
    assert risk.for_drafts().options.rule == "thesis"
    assert thesis.for_drafts() is thesis
    assert ThresholdEstimator().for_drafts().threshold == 0.9


def test_drafts_learn_on_without_changing_what_they_came_from() -> None:
    estimator = fed(50)
    before = estimator.to_dict()
    drafts = estimator.for_drafts()
    drafts.observe([0.5] * 30, [False] * 30)
    drafts.end_sequence()
    assert estimator.to_dict() == before
    assert drafts.texts.count == estimator.texts.count + 1


def test_an_estimator_of_format_1_keeps_its_rule_and_its_threshold() -> None:
    record = fed(40, rule="thesis", initial=0.9).to_dict()
    old = record | {
        "format": 1,
        "options": {k: v for k, v in record["options"].items() if k not in ("rule", "risk", "level")},
    }
    del old["texts"]
    found = ThresholdEstimator.from_dict(old)
    assert (found.options.rule, found.threshold) == ("thesis", record["history"][-1]["threshold"])
    assert found.by("risk") == 1.0
    with pytest.raises(CheckpointError, match="format"):
        ThresholdEstimator.from_dict(record | {"format": 1.5})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("wrong", [0] * 3, "wrong must be a list of 200 counts"),
        ("wrong", [10**9] * STEPS, "wrong must be counts that fall from at most"),
        ("wrong", list(range(STEPS)), "wrong must be counts that fall"),
        ("seen", [-1] * STEPS, "seen must be >= 0, got -1"),
        ("open_tokens", 0.5, "open_tokens must be an integer"),
    ],
)
def test_damaged_sums_are_refused(name: str, value: Any, message: str) -> None:
    record = fed(12).to_dict()
    record["texts"][name] = value
    with pytest.raises(CheckpointError, match=message):
        ThresholdEstimator.from_dict(record)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"risk": 0}, "risk must be"), ({"level": 1}, "level must be"), ({"rule": "thesi"}, "did you mean 'thesis'")],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ThresholdOptions(**options)
