"""Scores in batches are those of each request alone, at every output of every kind of model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fathomlm.decode.full import generate
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate import scoring
from fathomlm.lab.evaluate.outputs import FULL, Output, depth_outputs, exit_outputs
from fathomlm.lab.evaluate.scoring import Pair, Score, Scorer
from lab.evaluate.evaluate_models import PLANS, ROUTED, model_of, random_pairs, slow_score

pytestmark = pytest.mark.usefixtures("one_thread")


def same(found: list[Score], expected: list[Score]) -> None:
    assert [score.greedy for score in found] == [score.greedy for score in expected]
    assert [score.log_likelihood for score in found] == pytest.approx(
        [score.log_likelihood for score in expected], rel=1e-5, abs=1e-4
    )


def outputs_of(name: str) -> tuple[Output, ...]:
    plan = PLANS[name][0]
    exits = () if name in ROUTED else exit_outputs(plan, "all")
    return (*exits, *(depth_outputs(plan, "all") if plan.recursions > 1 else ()), FULL)


@pytest.mark.parametrize("name", PLANS)
def test_every_output_is_that_of_a_plain_forward(name: str) -> None:
    model, outputs = model_of(name), outputs_of(name)
    pairs = random_pairs(8, longest=14)
    found = Scorer(model, outputs, batch=3).score(pairs)
    assert len({tuple(scores) for scores in found}) >= len(set(outputs)) - 2  # the end comes three times: full, all depths
    for output, scores in zip(outputs, found, strict=True):
        same(scores, [slow_score(model, output, pair) for pair in pairs])


def test_the_whole_model_is_what_transformers_sees() -> None:
    model = model_of("looped")
    (pair,) = random_pairs(1)
    (scores,) = Scorer(model).score([pair])
    with torch.inference_mode():
        logits = model(torch.tensor([[*pair.context, *pair.continuation]])).logits[0]
    likely = logits.log_softmax(-1)[len(pair.context) - 1 : -1]
    assert scores[0].log_likelihood == pytest.approx(
        float(likely.gather(1, torch.tensor(pair.continuation)[:, None]).sum()), abs=1e-4
    )


@pytest.mark.parametrize("name", ["looped", "expert", "token"])
def test_neither_batch_nor_order_nor_padding_changes_a_score(name: str) -> None:
    model = model_of(name, windows=(5, None, 4, None, 5, None) if name == "looped" else None)
    pairs = random_pairs(23)
    outputs = (FULL, *depth_outputs(model.plan, 1))
    alone = [Scorer(model, outputs, batch=1).score([pair]) for pair in pairs]
    shuffled = random.Random(1).sample(range(len(pairs)), len(pairs))
    for batch in (4, 23, 64):
        found = Scorer(model, outputs, batch=batch).score([pairs[i] for i in shuffled])
        for number in range(len(outputs)):
            same(found[number], [alone[i][number][0] for i in shuffled])


def test_greedy_is_what_decoding_would_choose() -> None:
    model = model_of("plain")
    prompt = [7, 3, 200, 41]
    for output in (Output(layer=2), FULL):
        (text,) = generate(model, [prompt], max_new_tokens=5, ignore_eos=True, exiting=output.exiting)
        right = Pair(tuple(prompt), text.tokens)
        wrong = Pair(tuple(prompt), (*text.tokens[:-1], (text.tokens[-1] + 1) % 257))
        first = Pair(tuple(prompt), ((text.tokens[0] + 1) % 257, *text.tokens[1:]))
        (scores,) = Scorer(model, (output,)).score([right, wrong, first])
        assert [score.greedy for score in scores] == [True, False, False]


def test_requests_that_differ_in_the_last_token_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("plain")
    shapes = []
    states = model.decoder.states
    monkeypatch.setattr(model.decoder, "states", lambda tokens, **how: shapes.append(tokens.shape) or states(tokens, **how))
    pairs = [Pair((5, 6, 7), (token,)) for token in (1, 2, 3, 4)] + [Pair((5, 6), (7, 9)), Pair((8,), (1,))]
    (scores,) = Scorer(model, batch=8).score(pairs)
    assert shapes == [(2, 3)]
    same(scores, [slow_score(model, FULL, pair) for pair in pairs])


def test_what_is_too_long_loses_its_beginning() -> None:
    model = model_of("plain")
    tokens = [i % 250 for i in range(200)]
    whole, end = Pair(tuple(tokens[:190]), tuple(tokens[190:])), Pair(tuple(tokens[103:190]), tuple(tokens[190:]))
    (scores,) = Scorer(model).score([whole, end])
    assert len(end) == model.architecture.context + 1
    assert scores[0] == scores[1]
    (short,) = Scorer(model, max_length=12).score([whole])
    same(short, [slow_score(model, FULL, Pair(tuple(tokens[187:190]), tuple(tokens[190:])))])


def test_scores_are_made_in_parts_where_the_vocabulary_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = model_of("looped"), random_pairs(6)
    outputs = outputs_of("looped")
    whole = Scorer(model, outputs).score(pairs)
    monkeypatch.setattr(scoring, "MOST_SCORES", 3 * 257)
    for found, expected in zip(Scorer(model, outputs).score(pairs), whole, strict=True):
        same(found, expected)


def test_progress_counts_requests() -> None:
    told: list[tuple[int, int]] = []
    Scorer(model_of("plain"), batch=2).score(random_pairs(5), lambda *now: told.append(now))
    assert told == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair((), (1,)), "one context token"),
        (Pair((1,), ()), "one continuation token"),
        (Pair((1,), (2,) * 97), "a continuation of 97 tokens does not fit the context of 96"),
        (Pair((1,), (2, 257)), "token 257 is outside the model's vocabulary of 257"),
        (Pair((300,), (2,)), "token 300 is outside the model's vocabulary of 257"),
    ],
)
def test_requests_that_cannot_be_scored_are_refused(pair: Pair, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Scorer(model_of("plain")).score([pair])


def test_settings_out_of_range_are_refused() -> None:
    model: Any = model_of("plain")
    with pytest.raises(OptionError, match="batch size must be >= 1, got 0"):
        Scorer(model, batch=0)
    with pytest.raises(OptionError, match="max length must be >= 1, got 0"):
        Scorer(model, max_length=0)
