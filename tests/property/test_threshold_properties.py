"""What holds for every threshold estimator, whatever confidences and agreements it sees."""

from __future__ import annotations

import dataclasses
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fathomlm.decode.threshold import GRID, PRIORS, RULES, ThresholdEstimator, ThresholdOptions
from fathomlm.decode.threshold_samples import BINS

quick = settings(deadline=None, max_examples=100)
confidences = st.sampled_from([0.0, 1.0, 5e-324, 1e-4, 1 - 1e-4, 0.5]) | st.floats(0, 1)
sequences = st.lists(st.lists(st.tuples(confidences, st.booleans()), max_size=30), max_size=8)
options = st.builds(
    ThresholdOptions,
    rule=st.sampled_from(RULES),
    risk=st.sampled_from([0.01, 0.1, 0.5]),
    initial=st.floats(0, 1),
    condition=st.floats(0, 1),
    priors=st.sampled_from(PRIORS),
    least=st.integers(2, 12),
    calibrating_sequences=st.none() | st.integers(1, 5),
)
fitting = options.map(lambda each: dataclasses.replace(each, rule="thesis"))


def run(estimator, several):
    for samples in several:
        estimator.observe([c for c, _ in samples], [agreed for _, agreed in samples])
        estimator.end_sequence()
    return estimator


def share(estimator, at):
    """How much of what was seen from a bin on agreed; 1 where nothing was seen."""
    agreed, not_agreed = sum(estimator.agree.bins[at:]), sum(estimator.disagree.bins[at:])
    return agreed / (agreed + not_agreed) if agreed + not_agreed else 1.0


def through_json(estimator):
    return ThresholdEstimator.from_dict(json.loads(json.dumps(estimator.to_dict(), allow_nan=False)))


@quick
@given(options, sequences, confidences)
def test_everything_is_finite_and_in_range(options, several, c):
    estimator = run(ThresholdEstimator(options), several)
    for refit in estimator.history:
        assert 0 <= refit.threshold <= 1
        assert all(0 < value <= 1e6 for beta in (refit.agree, refit.disagree) for value in (beta.alpha, beta.beta))
    assert 0 <= estimator.threshold <= 1
    assert 0 <= estimator.posterior(c) <= 1
    assert all(0 <= estimator.density(agreed, c) < math.inf for agreed in (True, False))


@quick
@given(options, sequences, sequences)
def test_json_keeps_it_exactly(options, before, after):
    estimator = run(ThresholdEstimator(options), before)
    again = through_json(estimator)
    assert again == estimator
    assert run(again, after) == run(estimator, after)
    assert through_json(again).to_dict() == estimator.to_dict()


@quick
@given(fitting, sequences)
def test_what_a_refit_does(options, several):
    """Held where a class is short, unless nearly everything disagrees; else what exits is likely enough to be agreed on."""
    estimator = ThresholdEstimator(options)
    for samples in several:
        before, calibrating = estimator.threshold, estimator.calibrating
        run(estimator, [samples])
        agreements, disagreements = estimator.agree.count, estimator.disagree.count
        if not calibrating:
            assert estimator.threshold == before
        elif min(agreements, disagreements) >= options.least:
            place, first = round(estimator.threshold * GRID), int(estimator.threshold * BINS)
            shares = [share(estimator, at) for at in range(BINS + 1)]
            if place < GRID:
                assert all(estimator.posterior(at / GRID) >= options.condition for at in range(place, GRID + 1, 37))
                assert estimator.posterior(1.0) >= options.condition
                raised = place > 0 and estimator.posterior((place - 1) / GRID) >= options.condition
                assert not raised or (
                    place % (GRID // BINS) == 0 and min(shares[place * BINS // GRID - 1 :][:2]) < options.condition
                )
                assert (
                    min(shares[first : first + 2]) >= options.condition or shares[place * BINS // GRID] >= options.condition
                )
            elif min(estimator.posterior(1.0), estimator.posterior((GRID - 1) / GRID)) >= options.condition:
                seen = estimator.agree.bins[-1] + estimator.disagree.bins[-1]
                assert shares[-2] < options.condition or seen < options.least
        elif disagreements >= options.least and agreements * 4 < disagreements:
            assert estimator.threshold == 1
        else:
            assert estimator.threshold == before


@quick
@given(
    st.lists(confidences, min_size=1, max_size=40),
    st.integers(4, 40),
    st.sampled_from(PRIORS),
    st.floats(0.21, 1),
    st.integers(0, 99),
    st.sampled_from(["thesis", "public"]),
)
def test_nothing_exits_while_nearly_everything_disagrees_at_all_confidences(values, times, priors, condition, shift, rule):
    """Each confidence comes once with an agreement and `times` times without: no threshold can be right, whatever the
    confidences are: few, many, all equal, at the ends."""
    chosen = ThresholdOptions(rule=rule, condition=condition, priors=priors, least=2, initial=shift / 100)
    estimator = ThresholdEstimator(chosen)
    several = [(c, agreed) for c in values for agreed in (True, *[False] * times)]
    run(estimator, [several, several])
    assert estimator.threshold == 1.0
