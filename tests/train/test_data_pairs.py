"""Pairs: what is stored, how rows are cut, padded and labelled, and that splitting a batch changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathomlm.errors import DataError, OptionError
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.loader import IGNORE, prefetch
from fathomlm.train.data.pairs import PairLoader
from fathomlm.train.data.prepare import PrepareOptions, prepare
from jsonl import write_jsonl

END = 256
PAIRS = [
    ("long dialogue " * n + "end", [f"summary {n}" + "!" * (n % 5), "another"] if n % 2 else f"so {n}") for n in range(30)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    records = [{"dialogue": source, "summary": target} for source, target in PAIRS]
    records.insert(3, {"dialogue": "nothing to say of it", "summary": ""})
    write_jsonl(folder / "a.jsonl", records)
    return prepare(
        PrepareOptions(
            sources=(str(folder / "a.jsonl"),),
            out=folder / "out",
            tokenizer="bytes",
            pairs=("dialogue", "summary"),
            validation_fraction=0,
            shard_tokens=900,
        )
    )


def target_of(pair):
    return pair[1][0] if isinstance(pair[1], list) else pair[1]


def loader(corpus, **more):
    settings = {"batch": 6, "seed": 1, "separator": END, "source_length": 100, "target_length": 10, **more}
    return PairLoader(corpus.pairs(), **settings)


def test_what_is_stored(corpus):
    pairs = corpus.pairs()
    assert len(corpus.manifest.splits["train"].shards) > 2
    assert (len(pairs), corpus.manifest.empty_documents, corpus.manifest.kind) == (30, 1, "pairs")
    for number, pair in enumerate(PAIRS):
        source, target = pairs.pair(number)
        assert bytes(source.tolist()) == pair[0].encode()
        assert target.tolist() == [*target_of(pair).encode(), END]
        assert pairs.lengths(number) == (len(source), len(target))
    corpus.verify()
    with pytest.raises(DataError, match="holds pairs, and tokens are required"):
        corpus.stream()


def test_a_missing_or_altered_middle_is_noticed(corpus, tmp_path):
    import shutil

    copy = shutil.copytree(corpus.path, tmp_path / "copy")
    file = copy / "train-00001.mid"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00001\.idx was altered"):
        Corpus.open(copy, verify="full")
    file.unlink()
    with pytest.raises(DataError, match=r"train-00001\.mid is missing"):
        Corpus.open(copy)


def test_rows_for_a_decoder(corpus):
    made = loader(corpus)
    numbers = made.samples(0, 6)
    batch = made.batch_at(0, 6)
    assert batch.tokens_BT.shape[1] % 8 == 0
    longest = 0
    for row, number in enumerate(numbers):
        source = list(PAIRS[number][0].encode())[-100:]
        target = [*target_of(PAIRS[number]).encode(), END][:10]
        whole = source + target
        longest = max(longest, len(whole) - 1)
        end = len(whole) - 1
        assert batch.tokens_BT[row, :end].tolist() == whole[:-1]
        assert (batch.tokens_BT[row, end:] == END).all()
        assert batch.keep_BT is not None
        assert batch.keep_BT[row].tolist() == [at < end for at in range(batch.tokens_BT.shape[1])]
        labels = batch.targets_BT[row]
        assert labels[len(source) - 1 : end].tolist() == target
        assert int((labels != IGNORE).sum()) == len(target)
    assert longest <= batch.tokens_BT.shape[1] < longest + 8


def test_rows_for_an_encoder_and_a_decoder(corpus):
    """The source keeps its beginning and ends with the separator; the decoder reads its start token, then the target."""
    made = loader(corpus, shuffle=False)
    batch = made.seq2seq(7).batch_at(6, 3)
    for row, number in enumerate((6, 7, 8)):
        source = [*PAIRS[number][0].encode()[:99], END]
        target = [*target_of(PAIRS[number]).encode(), END][:10]
        assert batch.tokens_BT[row, : len(target)].tolist() == [7, *target[:-1]]
        assert batch.source_BS[row, : len(source)].tolist() == source
        assert batch.source_keep_BS[row].sum() == len(source)
        assert batch.source_keep_BS[row, : len(source)].all()
        assert batch.targets_BT[row].tolist() == target + [IGNORE] * (batch.targets_BT.shape[1] - len(target))
    assert batch.source_BS.shape[1] % 8 == batch.targets_BT.shape[1] % 8 == 0


@given(st.data())
@settings(max_examples=40)
def test_no_split_changes_a_batch(corpus, data):
    world, micro = data.draw(st.sampled_from([(1, 6), (2, 3), (3, 1), (6, 1), (2, 1), (1, 2)]))
    start = data.draw(st.integers(0, 90))
    made = loader(corpus)
    for read, names in (
        (made.batch_at, ("tokens_BT", "targets_BT", "keep_BT")),
        (made.seq2seq().batch_at, ("source_BS", "source_keep_BS", "tokens_BT", "targets_BT")),
    ):
        whole = read(start, 6)
        parts = [part for rank in range(world) for part in read(start, 6, rank, world).split(micro)]
        for name in names:
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_every_pair_once_an_epoch_and_another_order_in_the_next(corpus):
    made = loader(corpus)
    orders = [made.samples(epoch * len(made), len(made)).tolist() for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]
    assert loader(corpus).samples(17, 20).tolist() == [*orders[0][17:], *orders[1][:7]]


def test_both_forms_can_be_prefetched(corpus):
    made = loader(corpus)
    with prefetch(made.seq2seq(), start=6, steps=2, rank=1, world=2, micro=1) as batches:
        found = list(batches)
    assert len(found) == 6
    assert all(batch.source_BS is not None for batch in found)
    assert torch.equal(torch.cat([b.source_BS for b in found[:3]]), made.seq2seq().batch_at(6, 6, 1, 2).source_BS)
    with prefetch(made, steps=1) as causal:
        assert torch.equal(next(causal).tokens_BT, made.batch_at(0, 6).tokens_BT)


@pytest.mark.parametrize("form", ["one row", "seq2seq"])
def test_few_widths_change_only_the_padding(corpus, form):
    """For a compiler, which makes code for each width."""
    plain, few = loader(corpus), loader(corpus, widths=2)
    if form == "seq2seq":
        plain, few = plain.seq2seq(), few.seq2seq()
    widths = set()
    for start in range(0, 30, 6):
        one, other = plain.batch_at(start, 6), few.batch_at(start, 6)
        widths.add(tuple(tensor.shape[1] for tensor in other.inputs.values() if tensor is not None))
        for name, tensor in one.inputs.items():
            assert tensor is None or torch.equal(other.inputs[name][:, : tensor.shape[1]], tensor)
        assert (other.targets_BT[:, one.targets_BT.shape[1] :] == IGNORE).all()
    assert len(widths) <= 4


def test_mistakes(corpus):
    with pytest.raises(OptionError, match="source and target length must be >= 1"):
        loader(corpus, source_length=0)
    with pytest.raises(OptionError, match="do not divide"):
        loader(corpus).seq2seq().batch_at(0, 6).split(4)


def test_pairs_of_one_source_stay_on_one_side(tmp_path):
    records = [{"s": f"question {n}", "t": f"answer {copy}"} for n in range(60) for copy in range(3)]
    write_jsonl(tmp_path / "a.jsonl", records)
    corpus = prepare(
        PrepareOptions(
            sources=(str(tmp_path / "a.jsonl"),),
            out=tmp_path / "out",
            tokenizer="bytes",
            pairs=("s", "t"),
            validation_fraction=0.3,
        )
    )
    sides = [
        {corpus.pairs(split).pair(n)[0].tobytes() for n in range(len(corpus.pairs(split)))}
        for split in ("train", "validation")
    ]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert len(corpus.pairs("validation")) % 3 == 0
