"""Rows of tokens: the same from a file and from the corpus made of it, and a sentence for what gives none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from fathomlm.errors import DataError, OptionError
from fathomlm.lab import token_rows
from fathomlm.lab.token_rows import find, read_rows, row_length, text_row
from fathomlm.train.data.prepare import PrepareOptions, prepare
from lab.analyze.tiny import TEXT, model_of, text_file

pytestmark = pytest.mark.usefixtures("one_thread")
DOCUMENTS = [f"{n} fathoms are {6 * n} feet" for n in range(60)]


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def lines(tmp_path: Path) -> str:
    text = "".join(json.dumps({"text": document, "other": "x" * 40}) + "\n" for document in DOCUMENTS)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(tmp_path / "lines.jsonl.gz")


def test_rows_follow_each_other_and_predict_the_next_token(model, tmp_path):
    rows = read_rows(find([text_file(tmp_path)]), model, context=32, rows=5)
    expected = torch.tensor(list(TEXT.encode()[: 5 * 32 + 1]))
    assert rows.tokens_NT.tolist() == expected[:-1].view(5, 32).tolist()
    assert rows.targets_NT.tolist() == expected[1:].view(5, 32).tolist()
    assert (len(rows), rows.context) == (5, 32)


def test_a_file_and_its_corpus_are_one(model, lines, tmp_path):
    held = {"validation_from": (lines,), "sources": (text_file(tmp_path),), "tokenizer": "bytes"}
    corpus = prepare(PrepareOptions(out=tmp_path / "corpus", **held)).path
    of_file, of_corpus = (read_rows(find([str(place)]), model, context=16, rows=1000) for place in (lines, corpus))
    separated = b"\x00".join(document.encode() for document in DOCUMENTS)
    assert (
        of_file.tokens_NT.flatten().tolist()
        == [256 if byte == 0 else byte for byte in separated][: of_file.tokens_NT.numel()]
    )
    assert of_file.tokens_NT.tolist() == of_corpus.tokens_NT.tolist()
    assert of_file.targets_NT.tolist() == of_corpus.targets_NT.tolist()


def test_a_model_without_a_tokenizer_reads_a_corpus_only(lines, tmp_path):
    model = model_of()
    model.tokenizer = None
    with pytest.raises(OptionError, match="no tokenizer, so it reads no text"):
        read_rows(find([lines]), model, context=16, rows=1)
    options = {"sources": (text_file(tmp_path),), "validation_from": (lines,), "tokenizer": "bytes"}
    corpus = prepare(PrepareOptions(out=tmp_path / "corpus", **options)).path
    assert len(read_rows(find([str(corpus)]), model, context=16, rows=3)) == 3


def test_sources_are_read_in_order_and_only_as_far_as_needed(model, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(token_rows, "LONG_TOKEN", 1)
    long = text_file(tmp_path, "ab" * 5000, "long.txt")
    rows = read_rows(find([long, lines]), model, context=16, rows=4)
    assert bytes(rows.tokens_NT.flatten().tolist()) == b"ab" * 32
    short = text_file(tmp_path, "one", "short.txt")
    rows = read_rows(find([short, lines]), model, context=8, rows=1)
    assert rows.tokens_NT[0].tolist() == [*b"one", 256, *b"0 fa"]


def test_another_column(model, lines):
    assert bytes(read_rows(find([lines]), model, context=8, rows=1, column="other").tokens_NT[0].tolist()) == b"x" * 8
    with pytest.raises(DataError, match="no column 'body'"):
        read_rows(find([lines]), model, context=8, rows=1, column="body")


def test_what_gives_no_row_is_said(model, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        find([str(tmp_path / "nowhere.txt")])
    with pytest.raises(OptionError, match="give --data"):
        find([])
    for text, held in (("", 0), (" \n", 0), ("x" * 31, 32)):
        places = find([text_file(tmp_path, text)])
        with pytest.raises(DataError, match=rf"hold {held} tokens, and a context of 32 requires 33"):
            read_rows(places, model, context=32, rows=1)
    assert len(read_rows(find([text_file(tmp_path, "x" * 32)]), model, context=32, rows=9)) == 1


def test_tokens_that_the_model_does_not_know(tmp_path):
    model = model_of(traits={"vocab": 100})
    with pytest.raises(DataError, match="outside the model's vocabulary of 100"):
        read_rows(find([text_file(tmp_path)]), model, context=16, rows=2)


def test_row_lengths(model):
    assert row_length(model, None) == 64
    assert row_length(model, None, most=20) == 20
    assert row_length(model, 33) == 33
    for wrong in (1, 65):
        with pytest.raises(OptionError, match=f"from 2 to the model's 64 tokens, got {wrong}"):
            row_length(model, wrong)


def test_a_text_is_one_row(model):
    rows = text_row(model, "six feet", most=4)
    assert (rows.tokens_NT.tolist(), rows.targets_NT) == ([[*b"six "]], None)
    with pytest.raises(OptionError, match="--text is empty"):
        text_row(model, " ", most=4)
