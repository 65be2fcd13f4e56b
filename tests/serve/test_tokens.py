"""A text never has fewer tokens than it is said to have at least, whatever the tokenizer does to it first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fathomlm.serve.tokens import LeastTokens

WORDS = ["the quick brown fox jumps over the lazy dog", "a fathom is six feet; the water is deep " * 4, " " * 64, "é" * 20]
TEXTS = st.lists(
    st.sampled_from(
        ["the ", "quick", " " * 40, "water", "é", "e\u0301", "각", "\u1100\u1161\u11a8", "▁", "<mask>", "\n", "🐋"]
    )
    | st.text(max_size=8),
    max_size=40,
).map("".join)


def byte_level(normalizer: Any = None, split: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = plain if split is None else pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama's: spaces become a block, and what is not in the vocabulary becomes bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "t", "h", "e", "th", "he", "the", "▁the", "▁▁", "▁▁▁▁"):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_mask(tokenizer: Tokenizer, **how: bool) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<mask>", **how)])
    return tokenizer


BOUNDED = {
    "byte level": byte_level,
    "split": lambda: byte_level(split=pre_tokenizers.Digits(individual_digits=True)),
    "composed": lambda: byte_level(normalizers.NFC()),
    "stripping": lambda: with_mask(byte_level(), lstrip=True, rstrip=True),
    "sentencepiece": sentencepiece,
    "special": lambda: with_mask(sentencepiece()),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_bound_is_a_bound(kind: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BOUNDED[kind]())
    least = LeastTokens(tokenizer)
    assert least("the water is deep " * 1000) > 50

    @settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def holds(text: str) -> None:
        for one in (text, text * 20):
            assert least(one) <= len(tokenizer(one, verbose=False)["input_ids"])

    holds()


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def dropping() -> Tokenizer:
    return byte_level(split=pre_tokenizers.Split(" ", "removed"))


@pytest.mark.parametrize(
    "make", [word_level, dropping, lambda: byte_level(normalizers.Strip())], ids=["words", "cut", "strip"]
)
def test_a_tokenizer_that_loses_characters_has_no_bound(make: Any) -> None:
    assert LeastTokens(PreTrainedTokenizerFast(tokenizer_object=make()))("the water " * 1000) == 0
    assert LeastTokens(None)("the water " * 1000) == 0
