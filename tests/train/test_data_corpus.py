"""A corpus is read as one stream, and refuses what does not fit: cut or altered files, another tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathomlm.errors import DataError
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.prepare import PrepareOptions, prepare

TEXTS = ["abc", "d", "", "efghij", "kl", "mnopqrs", "t"]
TOKENS = [token for text in TEXTS if text for token in [*text.encode(), 256]]
DOCUMENTS = [n for n, text in enumerate(filter(None, TEXTS)) for _ in range(len(text) + 1)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return prepare(
        PrepareOptions(
            sources=(str(folder / "a.jsonl"),),
            out=folder / "out",
            tokenizer="bytes",
            validation_fraction=0,
            shard_tokens=8,
        )
    )


@pytest.fixture
def copy(corpus, tmp_path):
    import shutil

    return shutil.copytree(corpus.path, tmp_path / "copy")


@given(st.data())
def test_any_range_across_shards(corpus, data):
    stream = corpus.stream()
    start = data.draw(st.integers(0, len(TOKENS)))
    stop = data.draw(st.integers(start, len(TOKENS)))
    assert stream.read(start, stop).tolist() == TOKENS[start:stop]
    assert stream.document_of(start, stop).tolist() == DOCUMENTS[start:stop]


def test_counts(corpus):
    stream = corpus.stream()
    assert len(corpus.manifest.splits["train"].shards) == 3
    assert (len(stream), stream.documents) == (len(TOKENS), 6)
    assert stream.read(0, 3).dtype == np.int64
    assert bytes(stream.document(2)[:-1].tolist()) == b"efghij"
    for start, stop in ((-1, 2), (3, 2), (0, len(TOKENS) + 1)):
        with pytest.raises(IndexError):
            stream.read(start, stop)
    with pytest.raises(IndexError):
        stream.document(6)


def test_what_is_not_there(corpus, tmp_path):
    assert not corpus.has("validation")
    with pytest.raises(DataError, match="has no validation documents"):
        corpus.stream("validation")
    with pytest.raises(DataError, match=r"unknown split 'valid' \(did you mean 'validation'\?\)"):
        corpus.stream("valid")
    with pytest.raises(DataError, match="holds tokens, and pairs are wanted"):
        corpus.pairs()
    with pytest.raises(DataError, match=r"is not a corpus \(no corpus.json\)"):
        Corpus.open(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        Corpus.open(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_cut_or_missing_file(copy, suffix):
    file = copy / f"train-00001{suffix}"
    raw = file.read_bytes()
    file.write_bytes(raw[:-2])
    with pytest.raises(DataError, match=rf"train-00001{suffix} has {len(raw) - 2} bytes in place of {len(raw)}.*--force"):
        Corpus.open(copy)
    file.unlink()
    with pytest.raises(DataError, match=rf"train-00001{suffix} is missing; copy the corpus again"):
        Corpus.open(copy)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_an_altered_file_is_found_by_its_checksum(copy, suffix):
    file = copy / f"train-00000{suffix}"
    raw = bytearray(file.read_bytes())
    raw[8] ^= 1
    file.write_bytes(raw)
    corpus = Corpus.open(copy)
    with pytest.raises(DataError, match=rf"train-00000{suffix} was altered"):
        corpus.verify()
    with pytest.raises(DataError, match="was altered"):
        Corpus.open(copy, verify="full")


def test_an_index_that_does_not_fit(copy):
    np.array([0, 4, 7], "<u8").tofile(copy / "train-00000.idx")
    manifest = json.loads((copy / "corpus.json").read_text())
    manifest["splits"]["train"]["shards"][0]["documents"] = 2
    (copy / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"train-00000.idx does not fit its tokens"):
        Corpus.open(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has format version 2, and this FathomLM reads 1"),
        ({"flavour": "salt"}, "is damaged .*unknown key 'flavour'"),
        ({"dtype": "float32"}, "is damaged"),
        ({"splits": {}}, "is damaged"),
    ],
)
def test_a_manifest_that_is_not_understood(copy, change, message):
    manifest = json.loads((copy / "corpus.json").read_text())
    (copy / "corpus.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(DataError, match=message):
        Corpus.open(copy)
    (copy / "corpus.json").write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        Corpus.open(copy)


def test_another_tokenizer_is_refused_naming_both(corpus, tiny_tokenizer):
    corpus.check_tokenizer(corpus.load_tokenizer())
    with pytest.raises(DataError, match=r"made with the tokenizer bytes \(\w{12}, 257 tokens\), but the model's is \w{12}"):
        corpus.check_tokenizer(tiny_tokenizer)
