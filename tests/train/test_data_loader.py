"""Loaders: each token once an epoch, and one order however it is resumed or split over devices."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathomlm.errors import OptionError
from fathomlm.train.data.loader import IGNORE, Loader, prefetch

SEPARATOR = 9999


class Counting:
    """A stream whose token n is n, cut into documents of the given lengths."""

    def __init__(self, *lengths: int) -> None:
        self._documents = np.repeat(np.arange(len(lengths)), lengths)

    def __len__(self) -> int:
        return len(self._documents)

    def read(self, start, stop):
        assert 0 <= start <= stop <= len(self)
        return np.arange(start, stop)

    def document_of(self, start, stop):
        return self._documents[start:stop]


def loader(stream, context=8, batch=4, seed=0, **more):
    return Loader(stream, context=context, batch=batch, seed=seed, separator=SEPARATOR, **more)


def same(one, other):
    for name in ("tokens_BT", "targets_BT", "documents_BT", "keep_BT"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    return True


@given(length=st.integers(1, 200), context=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_every_token_is_an_input_once_an_epoch(length, context, seed, epoch):
    made = loader(Counting(length), context=context, seed=seed)
    W = len(made)
    batch = made.batch_at(epoch * W, W)
    tokens, targets = batch.tokens_BT.flatten(), batch.targets_BT.flatten()
    real = tokens != SEPARATOR
    assert sorted(tokens[real].tolist()) == list(range(length))
    assert (targets[~real] == IGNORE).all()
    labelled = targets != IGNORE
    assert torch.equal(targets[labelled], tokens[labelled] + 1)
    assert int(labelled.sum()) == length - 1


def test_padding_and_the_last_label():
    batch = loader(Counting(5), context=4, shuffle=False).batch_at(0, 2)
    assert batch.tokens_BT.tolist() == [[0, 1, 2, 3], [4, SEPARATOR, SEPARATOR, SEPARATOR]]
    assert batch.targets_BT.tolist() == [[1, 2, 3, 4], [IGNORE] * 4]
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.documents_BT is None
    assert batch.keep_BT is None


def test_documents_are_numbered_in_the_row_and_keep_their_labels_to_themselves():
    batch = loader(Counting(3, 1, 5), context=4, shuffle=False, document_ids=True).batch_at(0, 3)
    assert batch.documents_BT is not None
    assert batch.documents_BT.dtype == torch.int32
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, -1, -1, -1]]
    assert batch.targets_BT.tolist() == [[1, 2, IGNORE, IGNORE], [5, 6, 7, 8], [IGNORE] * 4]


@given(st.data())
@settings(max_examples=60)
def test_ranks_together_are_the_global_batch(data):
    world = data.draw(st.integers(1, 6))
    count = world * data.draw(st.integers(1, 4))
    start = data.draw(st.integers(0, 100))
    made = loader(Counting(30, 41), context=5, seed=data.draw(st.integers(0, 9)), document_ids=True)
    whole = made.batch_at(start, count)
    parts = [made.batch_at(start, count, rank, world) for rank in range(world)]
    for name in ("tokens_BT", "targets_BT", "documents_BT"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@given(st.data())
@settings(max_examples=60)
def test_a_resume_on_any_number_of_devices_goes_on_where_it_was(data):
    stream = Counting(100)
    batch = 12
    wanted = loader(stream, context=7, seed=3).samples(0, 10 * batch)
    taken, cut = [], data.draw(st.integers(0, 9))
    worlds = [data.draw(st.sampled_from([1, 2, 3, 4, 6, 12])) for _ in range(2)]
    for world, steps in zip(worlds, (range(cut), range(cut, 10)), strict=True):
        made = loader(stream, context=7, batch=batch, seed=3)  # a new process has a new loader
        for step in steps:
            taken += [made.batch_at(step * batch, batch, rank, world).tokens_BT[:, 0] for rank in range(world)]
    firsts = torch.cat(taken).tolist()
    assert firsts == [7 * int(window) for window in wanted]


def test_epochs_differ_and_seeds_differ_and_are_what_numpy_says():
    made = loader(Counting(800), seed=5)
    W = len(made)
    orders = [made.samples(epoch * W, W) for epoch in range(3)]
    for epoch, order in enumerate(orders):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, epoch])))
        assert (order == generator.permutation(W)).all()
    assert (orders[0] != orders[1]).any()
    assert (loader(Counting(800), seed=6).samples(0, W) != orders[0]).any()
    assert (made.samples(W - 3, 6) == np.concatenate([orders[0][-3:], orders[1][:3]])).all()
    assert (loader(Counting(800), shuffle=False).samples(W - 1, 2) == [W - 1, 0]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loader(Counting(9), context=0), "context and batch must be >= 1"),
        (lambda: loader(Counting(0)), "nothing to train on"),
        (lambda: loader(Counting(9), seed=-1), "seed must be >= 0"),
        (lambda: loader(Counting(9)).batch_at(0, 6, 0, 4), "6 samples does not divide among 4 devices"),
        (lambda: loader(Counting(9)).batch_at(0, 4, 2, 2), "rank must be < 2, got 2"),
        (lambda: loader(Counting(9)).batch_at(0, 4).split(3), "do not divide into micro-batches of 3"),
        (lambda: prefetch(loader(Counting(9)), micro=3), "4 samples a device do not divide into micro-batches of 3"),
        (lambda: prefetch(loader(Counting(9)), world=3), "4 samples does not divide among 3 devices"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(OptionError, match=message):
        call()


def threads():
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_prefetching_changes_nothing(ahead):
    made = loader(Counting(300), batch=8, document_ids=True)
    with prefetch(made, start=16, steps=5, rank=1, world=2, micro=2, ahead=ahead) as batches:
        found = list(batches)
    wanted = [micro for step in range(5) for micro in made.batch_at(16 + 8 * step, 8, 1, 2).split(2)]
    assert len(found) == len(wanted) == 10
    assert all(same(*both) for both in zip(found, wanted, strict=True))
    assert threads() == 0


def test_prefetching_ends_with_its_user():
    def use():
        with prefetch(loader(Counting(300))) as batches:
            for _ in batches:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert threads() == 0
    endless = prefetch(loader(Counting(300)))
    next(endless)
    endless.close()
    endless.close()
    assert list(endless) == []
    assert threads() == 0


def test_an_error_while_prefetching_is_raised_where_the_batch_is_wanted():
    class Broken(Counting):
        def read(self, start, stop):
            raise OSError("the disk is gone")

    batches = prefetch(loader(Broken(300)), steps=3)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert threads() == 0
    assert list(batches) == []


def test_a_batch_moves_as_a_whole():
    batch = loader(Counting(30), document_ids=True).batch_at(0, 2)
    assert same(batch.to("cpu"), batch)
    assert batch.to("meta").documents_BT.device.type == "meta"
