"""Texts as tokens, by lm-evaluation-harness' rules."""

from __future__ import annotations

from typing import Any

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.scoring import Pair, TextEncoder, windows
from lab.evaluate.evaluate_models import model_of


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder(model_of("plain"))


def begun(tokenizer: Any) -> Any:
    """The tokenizer, with a begin token in front of every text, as Llama's and Gemma's have."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    name, number = tokenizer.bos_token, tokenizer.bos_token_id
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=name, eos_token=tokenizer.eos_token
    )
    fast.backend_tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, number)])
    return fast


def test_spaces_at_the_border_belong_to_the_continuation(encoder: TextEncoder) -> None:
    tight, loose = encoder.pairs([("a b", " c"), ("a b  ", "c")])
    assert tight == Pair(tuple(b"a b"), tuple(b" c"))
    assert loose == Pair(tuple(b"a b"), tuple(b"  c"))


def test_an_empty_context_is_the_begin_token(encoder: TextEncoder) -> None:
    plain, marked, blank = encoder.pairs([("", "ab"), ("", "<|endoftext|>ab"), ("  ", "ab")])
    assert plain == Pair((256,), tuple(b"ab"))
    assert marked == plain
    assert blank == Pair((256,), tuple(b"  ab"))
    with pytest.raises(DataError, match="nothing is left to score"):
        encoder.pairs([("", "<|endoftext|>")])


def test_order_is_kept_whatever_is_tokenised_together(encoder: TextEncoder) -> None:
    texts = [("x", " 1"), ("", "2"), ("x", " 3"), ("", "4"), ("y", " 5")]
    found = encoder.pairs(texts)
    assert found == [encoder.pairs([text])[0] for text in texts]
    assert encoder.pairs([]) == []


def test_tokens_over_the_border_are_scored_as_one_text(tiny_model: Any) -> None:
    encoder, tokenizer = TextEncoder(tiny_model), tiny_model.tokenizer
    (pair,) = encoder.pairs([("the quick bro", "wn fox")])
    whole = tuple(tokenizer("the quick brown fox")["input_ids"])
    border = len(tokenizer("the quick bro")["input_ids"])
    assert pair.context + pair.continuation == whole
    assert pair.context == whole[:border]
    (merged,) = encoder.pairs([("th", "e")])  # one token holds both
    assert merged.context + merged.continuation == tuple(tokenizer("the")["input_ids"])
    assert len(merged.continuation) == 1


def test_a_begin_token_is_added_once() -> None:
    model = model_of("plain")
    model.tokenizer = begun(model.tokenizer)
    encoder = TextEncoder(model)
    plain, marked = encoder.pairs([("a", " b"), ("<|endoftext|>a", " b")])
    assert plain == marked == Pair((256, *b"a"), tuple(b" b"))
    assert encoder.encode_plain(["ab"]) == [list(b"ab")]


def test_models_without_what_is_needed_are_refused() -> None:
    model = model_of("plain")
    model.tokenizer.bos_token = model.tokenizer.eos_token = None
    model.config.bos_token_id = None
    encoder = TextEncoder(model)
    assert encoder.pairs([("a", "b")]) == [Pair(tuple(b"a"), tuple(b"b"))]
    with pytest.raises(OptionError, match="neither a begin nor an end token"):
        encoder.pairs([("", "b")])
    model.tokenizer = None
    with pytest.raises(OptionError, match="has no tokenizer"):
        TextEncoder(model)


def test_windows_score_each_token_once_behind_as_much_context_as_fits() -> None:
    assert windows(range(10), prefix=99, length=4) == [
        Pair((99,), (0, 1, 2, 3)),
        Pair((3,), (4, 5, 6, 7)),
        Pair((5, 6, 7), (8, 9)),
    ]
    assert windows(range(7), prefix=None, length=4, stride=2) == [Pair((0,), (1, 2, 3, 4)), Pair((2, 3, 4), (5, 6))]
    for many in range(1, 12):
        for stride in (1, 2, 3, 4):
            found = windows(range(many), prefix=99, length=4, stride=stride)
            assert [token for pair in found for token in pair.continuation] == list(range(many))
            row = (99, *range(many))
            for pair in found[1:]:
                at = row.index(pair.continuation[-1])
                assert (*pair.context, *pair.continuation) == row[at - 4 : at + 1]
    assert windows([], prefix=99, length=4) == []
    assert windows([5], prefix=None, length=4) == []
    for stride in (0, 5):
        with pytest.raises(OptionError, match=f"from 1 to the window's 4 tokens, got {stride}"):
            windows(range(9), prefix=99, length=4, stride=stride)


def test_whole_windows_are_those_of_the_harness() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for many in range(1, 40):
        for length in (1, 2, 5, 8):
            theirs = utils.get_rolling_token_windows(list(range(many)), prefix_token=99, max_seq_len=length, context_len=1)
            expected = [utils.make_disjoint_window(window) for window in theirs]
            found = windows(range(many), prefix=99, length=length)
            assert [(list(pair.context), list(pair.continuation)) for pair in found] == expected
