"""Perplexity: every token once, in nats per token and bits per byte."""

from __future__ import annotations

import math

import pytest
import torch

from fathomlm.errors import DataError
from fathomlm.lab.evaluate.outputs import FULL, Output
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder, predict
from fathomlm.model.hub import FathomForCausalLM
from lab.evaluate.evaluate_models import model_of, slow_logits

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["six feet are a fathom", "", "é"]


def slow_nats(model: FathomForCausalLM, output: Output, text: str, most: int = 96) -> float:
    """Each token by itself behind as many as fit."""
    row = [256, *text.encode()]
    nats = 0.0
    for at in range(1, len(row)):
        with torch.inference_mode():
            likely = slow_logits(model, output, row[max(0, at - most) : at])[-1].log_softmax(-1)
        nats -= float(likely[row[at]])
    return nats


def test_documents_are_predicted_each_by_itself() -> None:
    model, outputs = model_of("looped"), (Output(layer=4), FULL)
    found = predict(Scorer(model, outputs), TextEncoder(model), TEXTS)
    for output, each in zip(outputs, found, strict=True):
        nats = sum(slow_nats(model, output, text) for text in TEXTS)
        assert (each.documents, each.tokens, each.bytes) == (2, 23, 23)
        assert each.nats == pytest.approx(nats, rel=1e-5)
        assert each.record() == {
            "documents": 2,
            "tokens": 23,
            "bytes": 23,
            "nats_per_token": pytest.approx(nats / 23),
            "perplexity": pytest.approx(math.exp(nats / 23), rel=1e-4),
            "bits_per_byte": pytest.approx(nats / 23 / math.log(2)),
        }


def test_joined_documents_are_one() -> None:
    model = model_of("plain")
    encoder, scorer = TextEncoder(model), Scorer(model)
    (joined,) = predict(scorer, encoder, TEXTS, join=True)
    (whole,) = predict(scorer, encoder, ["six feet are a fathom\n\n\n\né"])
    assert joined == whole
    assert joined.documents == 1


def test_a_stride_of_one_gives_every_token_all_the_context_that_fits() -> None:
    model = model_of("plain")
    text = "the water is deep here"
    (found,) = predict(Scorer(model, max_length=5), TextEncoder(model), [text], stride=1)
    assert found.nats == pytest.approx(slow_nats(model, FULL, text, most=5), rel=1e-5)
    (far,) = predict(Scorer(model, max_length=5), TextEncoder(model), [text])
    assert far.nats != pytest.approx(found.nats, rel=1e-3)
    assert far.tokens == found.tokens == len(text)


def test_nothing_to_predict_is_an_error() -> None:
    model = model_of("plain")
    with pytest.raises(DataError, match="no text to predict"):
        predict(Scorer(model), TextEncoder(model), ["", ""])
