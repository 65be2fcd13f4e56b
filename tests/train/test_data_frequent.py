"""The most frequent tokens of some texts: by count, then by id, and never without those that end a text."""

from __future__ import annotations

import pytest
import torch

from fathomlm.errors import DataError, OptionError
from fathomlm.train.data import frequent
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.frequent import frequent_in_corpus, frequent_tokens
from fathomlm.train.data.tokenizers import byte_tokenizer

BYTES = byte_tokenizer()
END = 256
TEXTS = ["cccc bbb", "bb aaa", "aa"]  # c 4, b 5, a 5, a space 2
A, B, C, SPACE = (ord(letter) for letter in "abc ")


def chosen(many, texts=TEXTS, vocab=257, **options):
    return frequent_tokens(iter(texts), BYTES, many, vocab=vocab, **options).tolist()


def test_by_count_then_by_id():
    assert chosen(1) == [END], "the end of a text is always there"
    assert chosen(2) == [A, END]
    assert chosen(3) == [A, B, END]
    assert chosen(4) == [A, B, C, END]
    assert chosen(5) == [SPACE, A, B, C, END]


def test_where_fewer_occur_low_ids_fill_up():
    assert chosen(8) == [0, 1, 2, SPACE, A, B, C, END]
    assert chosen(257) == list(range(257))


def test_some_are_there_however_rare():
    assert chosen(3, always=[7, END]) == [7, A, END]
    assert chosen(3, always=[7, 9999]) == [7, A, END], "an id that the tokenizer does not have is no token"


def test_many_texts_are_all_counted():
    texts = ["x"] * 130 + ["y"] * 131 + ["z"]
    assert chosen(2, texts) == [ord("y"), END]
    assert chosen(3, texts) == [ord("x"), ord("y"), END]


def test_a_model_with_fewer_tokens_than_its_tokenizer():
    assert chosen(3, vocab=99) == [SPACE, A, B], "neither c nor the end is below 99"


@pytest.mark.parametrize(("many", "vocab"), [(0, 257), (-1, 257), (258, 257), (100, 99)])
def test_a_number_that_is_out_of_range(many, vocab):
    with pytest.raises(OptionError, match=r"exit_vocab must be from 1 \(the special tokens\) to (257|99) \(all\), got"):
        chosen(many, vocab=vocab)
    with pytest.raises(OptionError, match="exit_vocab must be from 3 "):
        chosen(2, always=[1, 2])


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_count(texts):
    with pytest.raises(DataError, match="no text to find frequent tokens in"):
        chosen(3, texts)


@pytest.mark.parametrize("size", [50, 333, 1 << 22])
def test_a_corpus_is_counted_as_its_texts_are(token_corpus, monkeypatch, size):
    """The slow twin tokenises what the corpus holds as tokens; what is held out does not count."""
    monkeypatch.setattr(frequent, "_SLICE", size)
    corpus = Corpus.open(token_corpus)
    stream = corpus.stream("train")
    texts = [bytes(stream.document(number)[:-1].tolist()).decode() for number in range(stream.documents)]
    for many in (2, 5, 12, 30, 257):
        found = frequent_in_corpus(corpus, BYTES, many, vocab=257, always=[7])
        assert torch.equal(found, frequent_tokens(texts, BYTES, many, vocab=257, always=[7]))


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_of_pairs_the_targets_are_counted(pair_corpus, monkeypatch, size):
    monkeypatch.setattr(frequent, "_PAIRS", size)
    corpus = Corpus.open(pair_corpus)
    pairs = corpus.pairs("train")
    targets = [bytes(pairs.pair(number)[1][:-1].tolist()).decode() for number in range(len(pairs))]
    for many in (1, 2, 5, 9):
        assert frequent_in_corpus(corpus, BYTES, many, vocab=257).tolist() == chosen(many, targets)
    assert ord("h") not in frequent_in_corpus(corpus, BYTES, 9, vocab=257), "sources have it, 'fathoms', and targets do not"


def test_numbers_out_of_range_by_the_name_that_users_know(token_corpus):
    corpus = Corpus.open(token_corpus)
    for many, vocab, always in ((0, 257, ()), (258, 257, ()), (100, 99, ()), (2, 257, (1, 2))):
        with pytest.raises(OptionError, match=r"^--many must be from [13] \(the special tokens\) to (257|99) \(all\), got"):
            frequent_in_corpus(corpus, BYTES, many, vocab=vocab, always=always, name="--many")
    assert frequent_in_corpus(corpus, BYTES, 3, vocab=99).tolist() == [32, 44, 97], "a model with fewer tokens"
