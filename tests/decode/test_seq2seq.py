"""Encoder-decoder models generate as transformers' do, and leave early by the same rules as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.decode.generation import Generation
from fathomlm.errors import OptionError
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from parity.t5_models import CONFIGS, write_tiny_t5

SOURCES = [[5, 9, 2, 7, 11, 3], [8, 8, 1], [4, 3, 2, 6, 10, 12, 14, 9, 1]]
NEW = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FathomForSeq2SeqLM:
    path = tmp_path_factory.mktemp("t5")
    write_tiny_t5("flan-t5", path)
    found = fathomlm.load(path)
    assert isinstance(found, FathomForSeq2SeqLM)
    return found.eval()


def texts(
    model: FathomForSeq2SeqLM, sources: list[list[int]], exiting: Exiting | None = None, **more: Any
) -> list[Generation]:
    return generate(model, sources, max_new_tokens=NEW, ignore_eos=True, exiting=exiting, **more)


def middling(model: FathomForSeq2SeqLM) -> float:
    """A threshold below which and above which there are confidences."""
    always = texts(model, SOURCES, Exiting(mode="parallel", exit_layers=(1,), threshold=0.0))
    return float(torch.tensor([c for text in always for c in text.confidences or ()]).median())


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = write_tiny_t5(kind, tmp_path)
    model = fathomlm.load(tmp_path)
    for source in SOURCES:
        # Without a cache: that of transformers fails where the decoder has more layers than the encoder.
        options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False}
        wanted = theirs.generate(torch.tensor([source]), **options)[0, 1:].tolist()
        (found,) = generate(model, [source], max_new_tokens=NEW)
        assert list(found.tokens) == wanted
        assert found.prompt_tokens == tuple(source)


@pytest.mark.parametrize("mode", ["full", "static", "state-copy", "parallel", "speculative", "oracle"])
def test_a_batch_gives_what_its_rows_give(model: FathomForSeq2SeqLM, mode: Any) -> None:
    given: dict[str, Any] = {} if mode == "full" else {"exit_layers": (1,)}
    if mode in ("state-copy", "parallel", "speculative"):
        given["threshold"] = middling(model)
    exiting = Exiting(mode=mode, **given)
    together = texts(model, SOURCES, exiting)
    for source, found in zip(SOURCES, together, strict=True):
        (alone,) = texts(model, [source], exiting)
        assert (alone.tokens, alone.exit_layers) == (found.tokens, found.exit_layers)


@pytest.mark.parametrize("mode", ["state-copy", "parallel", "speculative"])
def test_at_threshold_1_texts_are_full_ones(model: FathomForSeq2SeqLM, mode: Any) -> None:
    whole = [text.tokens for text in texts(model, SOURCES)]
    found = texts(model, SOURCES, Exiting(mode=mode, exit_layers=(1,), threshold=1.0))
    assert [text.tokens for text in found] == whole
    assert all(layer == model.plan.unrolled_layers for text in found for layer in text.exit_layers or ())


def test_speculative_texts_are_full_ones_at_any_threshold(model: FathomForSeq2SeqLM) -> None:
    whole = [text.tokens for text in texts(model, SOURCES)]
    for threshold in (0.0, middling(model)):
        found = texts(model, SOURCES, Exiting(mode="speculative", exit_layers=(1,), threshold=threshold))
        assert [text.tokens for text in found] == whole


def test_a_conversation_is_refused(model: FathomForSeq2SeqLM) -> None:
    with pytest.raises(OptionError, match="decoder-only"):
        Session(model)  # type: ignore[arg-type]
