"""A model with fewer tokens: the rows of its embedding and head for those that stay, and a tokenizer that has no others.

In a small model the embedding is much of the weight: 28M of SmolLM2-135M's 135M parameters, most of them for tokens that
a given kind of text hardly has. The rest of the model stays as it is.

Byte pair encoding joins neighbours, the pair of lowest rank first. A token that stays keeps the tokens that it is joined
from on the way. So text all of whose tokens stay is cut as before: every pair that was joined there can still be joined, and
leaving out a pair that was not joined changes nothing. What does not stay falls into smaller tokens, and in the end into
single bytes or characters, which all stay.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from fathomlm.checkpoints.assemble import BaseCheckpoint, load_base
from fathomlm.checkpoints.reduced import KeptTokens
from fathomlm.checkpoints.resolve import parse_device, parse_dtype, plain_base
from fathomlm.errors import DataError, OptionError, require
from fathomlm.model.seq2seq import FathomModel

Item = TypeVar("Item")
_TEXTS = 64
"""Texts that are tokenized at once."""
_WRAPPER = ("chat_template", "model_max_length", "padding_side", "truncation_side", "model_input_names",
            "clean_up_tokenization_spaces", "extra_special_tokens")  # fmt: skip
"""What a transformers tokenizer has beside its backend and the special tokens that have a name."""


def trim_vocab(
    model: FathomModel | BaseCheckpoint | str | Path,
    texts: str | Iterable[str],
    size: int,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> FathomModel:
    """A plain model with the `size` tokens that occur most often in some texts, and its tokenizer with those alone."""
    base = plain_base(model)
    tokenizer = tokenizer_of(base)
    counts = count_tokens([texts] if isinstance(texts, str) else texts, tokenizer)
    tokens = frequent_parts(base, tokenizer, counts, size)
    small = KeptTokens(base, tokens, trimmed_tokenizer(tokenizer, tokens))
    return load_base(small, parse_dtype(dtype), parse_device(device), "the model")


def with_vocab_of(source: FathomModel | BaseCheckpoint | str | Path, tokenizer: Any) -> BaseCheckpoint:
    """A plain model with the tokens that a tokenizer has, which is its own without some of them."""
    base = plain_base(source)
    whole = tokenizer_of(base)
    own = BytePairs(whole)
    numbers, vocab = {name: token for token, name in own.names.items()}, tokenizer.get_vocab()
    missing = [name for name in vocab if name not in numbers]
    missing += [own.names[token] for token in own.symbols if own.names[token] not in vocab]
    if missing:
        raise OptionError(
            f"the tokenizer is not the model's with fewer tokens ({missing[0]!r:.40} is in one of them only); make one with "
            "`fathomlm convert --vocab`"
        )
    tokens = [numbers[name] for name in sorted(vocab, key=vocab.__getitem__)]
    return KeptTokens(base, tokens, trimmed_tokenizer(whole, tokens))


def tokenizer_of(base: BaseCheckpoint) -> Any:
    if base.encoder is not None:
        raise OptionError("the vocabulary of an encoder-decoder model cannot be trimmed; give a decoder-only one")
    if (tokenizer := base.tokenizer()) is None:
        raise OptionError("the model has no tokenizer, so its vocabulary cannot be trimmed")
    if not tokenizer.is_fast:
        raise OptionError("only tokenizers that a tokenizer.json describes can be trimmed")
    if (most := max(tokenizer.get_vocab().values())) >= base.architecture.vocab:
        raise OptionError(f"the tokenizer has token {most}, the model's vocabulary has {base.architecture.vocab}")
    return tokenizer


def count_tokens(texts: Iterable[str], tokenizer: Any) -> Counter[int]:
    """How often each token occurs in some texts."""
    counts = Counter[int]()
    for batch in batches(texts, _TEXTS):
        # Not verbose: transformers would warn about length, which is no matter here.
        counts.update(chain.from_iterable(tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]))
    if not counts:
        raise DataError("there is no text to find frequent tokens in")
    return counts


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch


def frequent_parts(base: BaseCheckpoint, tokenizer: Any, counts: Counter[int], size: int) -> list[int]:
    """The `size` tokens of a base and its tokenizer that stay, as rising ids: special ones, single symbols, and those that
    occur most often, each with the tokens that it is joined from. Of two that occur as often the lower id comes first: low
    ids of a byte-pair tokenizer are its commonest."""
    pairs = BytePairs(tokenizer)
    known = set(pairs.names)
    kept, most = known & {*pairs.symbols, base.tokens.bos, *base.tokens.eos, base.tokens.pad}, len(known) - 1
    require(len(kept) <= size <= most, "vocab", f"from {len(kept):,} (special tokens, single symbols) to {most:,}", size)
    wanted = sorted(known - kept, key=lambda token: (-counts[token], token))
    while len(kept) < size:  # what did not fit may, once others have brought its parts
        for token in wanted:
            new = {token, *pairs.parts(token)} - kept if token not in kept else set()
            if len(kept) + len(new) <= size:
                kept |= new
            if len(kept) == size:
                break
    return sorted(kept)


def pieces_more(tokenizer: Any, small: KeptTokens, counts: Counter[int]) -> tuple[float, float]:
    """Of counted text, the share of tokens that stay, and how many times as many tokens it has without the others, each
    of which is taken apart by itself."""
    pieces, kept, total = small.tokenizer().backend_tokenizer.model, set(small.kept), counts.total()
    gone = {token: count for token, count in counts.items() if token not in kept}
    more = sum(
        count * (len(pieces.tokenize(name)) - 1)
        for name, count in zip(tokenizer.convert_ids_to_tokens(list(gone)), gone.values(), strict=True)
    )
    return 1 - sum(gone.values()) / total, 1 + more / total


class BytePairs:
    """What a byte-pair tokenizer's file says of its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.spec: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        model = self.spec["model"]
        if model["type"] != "BPE":
            raise OptionError(f"only a BPE vocabulary can be trimmed; this tokenizer is of type {model['type']}")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise OptionError(f"a vocabulary with a {name} cannot be trimmed")
        self._vocab: dict[str, int] = model["vocab"]
        self._ranks = {pair: rank for rank, pair in enumerate(map(_pair, model["merges"]))}
        added = {each["id"]: each["content"] for each in self.spec["added_tokens"]}
        self.names = {token: name for name, token in self._vocab.items()} | added
        single = _is_byte if model.get("byte_fallback") and "<0x00>" in self._vocab else _is_letter
        unknown = model["unk_token"]
        self.symbols = {*added, *(token for name, token in self._vocab.items() if single(name) or name == unknown)}
        """Special and added tokens, and those that all text can be made of."""

    def parts(self, token: int) -> list[int]:
        """The tokens that are joined on the way to a token, itself left out."""
        symbols, found = list(self.names[token]), list[int]()
        while len(symbols) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(symbols)]
            if (least := min(ranks)) == len(self._ranks):
                break
            at = ranks.index(least)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            found.append(self._vocab[symbols[at]])
        own = (self._vocab[symbol] for symbol in self.names[token] if symbol in self._vocab)
        return [part for part in (*own, *found) if part != token]


def trimmed_tokenizer(tokenizer: Any, tokens: Sequence[int]) -> Any:
    """The tokenizer with some of its tokens, numbered in their order."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    pairs = BytePairs(tokenizer)
    spec, numbers = copy.deepcopy(pairs.spec), {token: number for number, token in enumerate(tokens)}
    model = spec["model"]
    vocab = {name: numbers[token] for name, token in model["vocab"].items() if token in numbers}
    model["vocab"] = vocab
    model["merges"] = [merge for merge in model["merges"] if _fits(_pair(merge), vocab)]
    spec["added_tokens"] = [{**each, "id": numbers[each["id"]]} for each in spec["added_tokens"]]
    _renumber(spec["post_processor"], numbers)
    wrapper = {name: getattr(tokenizer, name) for name in _WRAPPER}
    backend = Tokenizer.from_str(json.dumps(spec))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map, **wrapper)


def _renumber(processor: dict[str, Any] | None, numbers: dict[int, int]) -> None:
    """What a tokenizer puts around a text is written with ids."""
    for each in (processor or {}).get("processors", ()):
        _renumber(each, numbers)
    named = (processor or {}).get("special_tokens", {})
    for special in named.values() if isinstance(named, dict) else ():
        special["ids"] = [numbers[token] for token in special["ids"]]
    for name in ("sep", "cls"):
        if processor is not None and name in processor:
            content, token = processor[name]
            processor[name] = [content, numbers[token]]


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _fits(pair: tuple[str, str], vocab: Collection[str]) -> bool:
    return all(name in vocab for name in (*pair, "".join(pair)))


def _is_letter(name: str) -> bool:
    return len(name) == 1


def _is_byte(name: str) -> bool:
    """Or SentencePiece's mark for a space: bytes of that would be read back as the mark."""
    return name == "\u2581" or (len(name) == 6 and name.startswith("<0x") and name.endswith(">"))
