"""The tokens that texts are mostly made of, for exits that choose among them alone (`limit_exits`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from fathomlm.errors import DataError, require

_TEXTS = 64
"""Texts that are tokenised at once."""


def frequent_tokens(texts: Iterable[str], tokenizer: Any, many: int, *, vocab: int, always: Iterable[int] = ()) -> Tensor:
    """The `many` tokens that occur most often in some texts, as rising ids below `vocab`, the model's.

    The tokenizer's special tokens and those of `always` (where a text ends) are among them, however rare: an exit that
    could not say them would never end. Of two that occur as often the lower id comes first, and so do those that do not
    occur at all: low ids of a byte-pair tokenizer are its commonest.
    """
    known = {token for token in tokenizer.get_vocab().values() if token < vocab}
    needed = known & {*tokenizer.all_special_ids, *always}
    least = max(1, len(needed))
    require(least <= many <= len(known), "words", f"from {least:,} (the special tokens) to {len(known):,} (all)", many)
    counts = Counter[int]()
    for batch in _batches(texts):
        # Not verbose: transformers would warn about length, which is no matter here.
        counts.update(chain.from_iterable(tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]))
    if not counts:
        raise DataError("there is no text to find frequent words in")
    others = sorted(known - needed, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted([*needed, *others[: many - len(needed)]]))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    source = iter(texts)
    while batch := list(islice(source, _TEXTS)):
        yield batch
