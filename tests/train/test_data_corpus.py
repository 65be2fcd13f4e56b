"""A corpus is read as one stream, and refuses what does not fit: cut or altered files, another tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathomlm.checkpoints.writing import seal
from fathomlm.errors import DataError
from fathomlm.train.data import shards as blocks
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.manifest import Manifest
from fathomlm.train.data.prepare import PrepareOptions, prepare
from jsonl import write_jsonl

TEXTS = ["abc", "d", "", "efghij", "kl", "mnopqrs", "t"]
TOKENS = [token for text in TEXTS if text for token in [*text.encode(), 256]]
DOCUMENTS = [n for n, text in enumerate(filter(None, TEXTS)) for _ in range(len(text) + 1)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", ({"text": text} for text in TEXTS))
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


def write_manifest(directory, record):
    """As the program would write it, checksum and all."""
    del record["checksum"]
    (directory / "corpus.json").write_text(json.dumps(seal(record)))


def flip(file, at, bit=1):
    raw = bytearray(file.read_bytes())
    raw[at] ^= bit
    file.write_bytes(raw)


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
    with pytest.raises(DataError, match="holds tokens, and pairs are required"):
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
    flip(copy / f"train-00000{suffix}", 8)
    corpus = Corpus.open(copy)
    for check in (corpus.verify, corpus.verify_sample):
        with pytest.raises(DataError, match=rf"train-00000{suffix} was altered"):
            check()
    for verify in ("full", "sample"):
        with pytest.raises(DataError, match="was altered"):
            Corpus.open(copy, verify=verify)


def test_every_byte_of_a_small_corpus_is_in_the_sample(copy):
    Corpus.open(copy, verify="sample")
    for file in sorted((*copy.glob("*.bin"), *copy.glob("*.idx"))):
        for at in range(file.stat().st_size):
            flip(file, at)
            with pytest.raises(DataError, match=rf"{file.name} (was altered|does not fit)"):
                Corpus.open(copy, verify="sample")
            flip(file, at)
    Corpus.open(copy, verify="full")


def test_a_sample_reads_no_more_than_its_budget(copy, monkeypatch):
    """Blocks of four bytes: 88 bytes of tokens and index in three shards, of which 40 are read, others each time."""
    manifest = Manifest.read(copy)
    monkeypatch.setattr(blocks, "BLOCK", 4)
    shards = [
        replace(shard, blocks={suffix: blocks.checksums((copy / shard.file).with_suffix(suffix).read_bytes())})
        for shard in manifest.splits["train"].shards
        for suffix in (".bin", ".idx")
    ]
    read = []
    blake = blocks.hashlib.blake2b
    monkeypatch.setattr(blocks.hashlib, "blake2b", lambda raw=b"", **more: read.append(len(raw)) or blake(raw, **more))
    for seed in (0, 1):
        read.clear()
        assert blocks.damaged(copy, shards, 40, random.Random(seed)) is None
        assert (len(read), sum(read)) == (10, 40)
    flip(copy / "train-00001.bin", 5)
    found = [blocks.damaged(copy, shards, 40, random.Random(seed)) for seed in range(20)]
    assert set(found) == {None, copy / "train-00001.bin"}


def test_blocks_do_not_depend_on_how_they_are_written(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    raw = bytes(range(11))
    wanted = tuple(hashlib.blake2b(raw[at : at + 4], digest_size=16).hexdigest() for at in (0, 4, 8))
    for size in (1, 3, 4, 5, 11):
        made = blocks.BlockChecksums()
        for at in range(0, len(raw), size):
            made.update(raw[at : at + size])
        assert made.finish() == wanted
    assert blocks.checksums(raw[:8]) == wanted[:2]
    assert blocks.checksums(b"") == ()


@pytest.fixture
def older(copy):
    """A corpus as version 1 wrote it: a checksum for each file, none for blocks and none for corpus.json."""
    record = json.loads((copy / "corpus.json").read_text())
    del record["checksum"]
    for split in record["splits"].values():
        for shard in split["shards"]:
            del shard["blocks"]
    (copy / "corpus.json").write_text(json.dumps({**record, "version": 1}))
    return copy


def test_a_corpus_of_an_earlier_version_is_read_and_verified_as_far_as_it_can_be(older, corpus):
    for verify in ("off", "sample", "full"):
        opened = Corpus.open(older, verify=verify)
    assert opened.stream().read(0, len(TOKENS)).tolist() == TOKENS
    flip(older / "train-00001.bin", 3)
    with pytest.raises(DataError, match=r"train-00001\.bin was altered"):
        opened.verify_sample()
    opened.verify_sample(budget=10)  # no whole shard fits


@pytest.mark.parametrize(("name", "value"), [("separator", 255), ("vocab", 258), ("checksum", "0"), ("version", 1)])
def test_a_corpus_json_that_was_altered(copy, name, value):
    record = json.loads((copy / "corpus.json").read_text())
    (copy / "corpus.json").write_text(json.dumps({**record, name: value}))
    with pytest.raises(DataError, match=r"corpus\.json was altered since it was written \(wrong checksum\)"):
        Corpus.open(copy)
    del record["checksum"]
    (copy / "corpus.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"wrong checksum"):
        Corpus.open(copy)


def test_an_index_that_does_not_fit(copy):
    np.array([0, 4, 7], "<u8").tofile(copy / "train-00000.idx")
    manifest = json.loads((copy / "corpus.json").read_text())
    manifest["splits"]["train"]["shards"][0]["documents"] = 2
    write_manifest(copy, manifest)
    with pytest.raises(DataError, match=r"train-00000.idx does not fit its tokens"):
        Corpus.open(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "has format version 3, and this FathomLM reads 1 and 2"),
        ({"flavour": "salt"}, "unknown field 'flavour'"),
        ({"dtype": "float32"}, "dtype must be one of 'uint16', 'uint32'"),
        ({"splits": {}}, "is damaged"),
    ],
)
def test_a_manifest_that_is_not_understood(copy, change, message):
    manifest = json.loads((copy / "corpus.json").read_text())
    write_manifest(copy, {**manifest, **change})
    with pytest.raises(DataError, match=message):
        Corpus.open(copy)
    (copy / "corpus.json").write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        Corpus.open(copy)


def test_another_tokenizer_is_refused_naming_both(corpus, tiny_tokenizer):
    corpus.check_tokenizer(corpus.load_tokenizer())
    with pytest.raises(DataError, match=r"made with the tokenizer bytes \(\w{12}, 257 tokens\), but the model's is \w{12}"):
        corpus.check_tokenizer(tiny_tokenizer)
