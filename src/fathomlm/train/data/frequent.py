"""The tokens that texts are mostly made of, for exits that choose among them alone (`limit_exits`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.checkpoints.vocabulary import batches, count_tokens
from fathomlm.errors import require
from fathomlm.train.data.corpus import Corpus

_PAIRS = 4096
_SLICE = 1 << 22
"""Pairs and tokens that are counted at once."""


def frequent_tokens(texts: Iterable[str], tokenizer: Any, many: int, *, vocab: int, always: Iterable[int] = ()) -> Tensor:
    """The `many` tokens that occur most often in some texts, as rising ids below `vocab`, the model's.

    The tokenizer's special tokens and those of `always` (where a text ends) are among them, however rare: an exit that
    could not say them would never end. Of two that occur as often the lower id comes first, and so do those that do not
    occur at all: low ids of a byte-pair tokenizer are its commonest.
    """
    known, needed = _candidates(tokenizer, many, vocab, always, "exit_vocab")
    return _most_frequent(count_tokens(texts, tokenizer), known, needed, many)


def frequent_in_corpus(
    corpus: Corpus, tokenizer: Any, many: int, *, vocab: int, always: Iterable[int] = (), name: str = "exit_vocab"
) -> Tensor:
    """`frequent_tokens` of a corpus' training text, which is tokens already; of pairs the targets count, which are what is
    learnt. `name` is what users call `many`."""
    known, needed = _candidates(tokenizer, many, vocab, always, name)
    room = max(vocab, corpus.manifest.vocab)
    counts_V = np.zeros(room, np.int64)
    for tokens in _slices(corpus):
        counts_V += np.bincount(tokens, minlength=room)
    return _most_frequent(Counter(dict(enumerate(counts_V.tolist()))), known, needed, many)


def _candidates(tokenizer: Any, many: int, vocab: int, always: Iterable[int], name: str) -> tuple[set[int], set[int]]:
    """All tokens that there are, and those that must be chosen."""
    known = {token for token in tokenizer.get_vocab().values() if token < vocab}
    needed = known & {*tokenizer.all_special_ids, *always}
    least = max(1, len(needed))
    require(least <= many <= len(known), name, f"from {least:,} (the special tokens) to {len(known):,} (all)", many)
    return known, needed


def _most_frequent(counts: Counter[int], known: set[int], needed: set[int], many: int) -> Tensor:
    others = sorted(known - needed, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted([*needed, *others[: many - len(needed)]]))


def _slices(corpus: Corpus) -> Iterator[npt.NDArray[np.int64]]:
    """The tokens of the training split, some at a time."""
    if corpus.manifest.kind == "pairs":
        pairs = corpus.pairs("train")
        for numbers in batches(range(len(pairs)), _PAIRS):
            yield np.concatenate([pairs.pair(number)[1] for number in numbers])
        return
    stream = corpus.stream("train")
    for start in range(0, len(stream), _SLICE):
        yield stream.read(start, min(start + _SLICE, len(stream)))
