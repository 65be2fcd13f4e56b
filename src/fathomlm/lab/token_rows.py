"""Text for an analysis as rows of tokens: files with the model's own tokenizer, or a prepared corpus' validation split.

Files become the tokens that `fathomlm data prepare` would make of them, a separator behind every document, so a file and
the corpus made of it give the same numbers. Only as much is read as is asked for.

Shapes: N rows, T tokens of a row, B batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fathomlm.decode.prompts import encode_prompt
from fathomlm.errors import DataError, OptionError
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.encoding import Encoder, EncoderSettings
from fathomlm.train.data.manifest import FILE
from fathomlm.train.data.sources import DataSource, expand, read
from fathomlm.train.data.tokenizers import separator_id

LONGEST_ROW = 1024
"""The row length where none is asked for and the model could read more."""
HELD = 4096
"""Tokens that are run at once."""
LONG_TOKEN = 32
"""Characters per token that no text reaches: of a long document so much is tokenised at first."""
TextSource = Corpus | DataSource
"""Where text comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Rows of equal length, and what reads and writes their tokens."""

    tokens_NT: Tensor
    targets_NT: Tensor | None
    """The token behind each; None where nobody predicts."""
    tokenizer: Any

    @property
    def context(self) -> int:
        return self.tokens_NT.shape[1]

    def __len__(self) -> int:
        return self.tokens_NT.shape[0]

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and targets (B, T), in order, as many rows at once as `HELD` allows."""
        assert self.targets_NT is not None
        rows = max(1, HELD // self.context)
        for at in range(0, len(self), rows):
            yield self.tokens_NT[at : at + rows].to(device), self.targets_NT[at : at + rows].to(device)


def find(data: Sequence[str]) -> list[TextSource]:
    """What `--data` names. Asked before a model is loaded, so that a slip costs no waiting."""
    places: list[TextSource] = []
    for name in data:
        if (Path(name).expanduser() / FILE).is_file():
            places.append(Corpus.open(name))
        else:
            places += expand([name])
    if not places:
        raise OptionError("give --data: a text or JSON-lines file, or a prepared corpus")
    return places


def row_length(model: FathomForCausalLM, context_length: int | None, most: int = LONGEST_ROW) -> int:
    """The row length that was asked for, if the model can read it; else as much as it can, up to `most`."""
    context = model.architecture.context
    if context_length is None:
        return max(2, min(context, most))
    if not 2 <= context_length <= context:
        raise OptionError(f"--context must be from 2 to the model's {context:,} tokens, got {context_length}")
    return context_length


def read_rows(
    places: Sequence[TextSource], model: FathomForCausalLM, *, context: int, rows: int, column: str = "text"
) -> TokenRows:
    """The first `rows` rows of `context` tokens, or all whole ones where there are fewer.

    Rows follow each other without a gap, as in training: a row's last token predicts the next row's first.
    """
    tokenizer = _tokenizer(places, model)
    ids_L = _take(places, tokenizer, rows * context + 1, column)
    vocab = model.architecture.vocab
    if len(ids_L) and int(ids_L.max()) >= vocab:
        raise DataError(
            f"token {int(ids_L.max())} is outside the model's vocabulary of {vocab:,}: the tokenizer is not its own"
        )
    count = (len(ids_L) - 1) // context
    if count < 1:
        raise DataError(
            f"the data hold {len(ids_L):,} tokens, and a context of {context:,} requires {context + 1:,} (the last is "
            "predicted only); give more text, or a smaller --context"
        )
    ids = torch.from_numpy(ids_L[: count * context + 1])
    return TokenRows(tokens_NT=ids[:-1].view(count, context), targets_NT=ids[1:].view(count, context), tokenizer=tokenizer)


def text_row(model: FathomForCausalLM, text: str, most: int) -> TokenRows:
    """One text as one row, tokenised as a prompt is; what is longer than `most` tokens is cut off."""
    if not text.strip():
        raise OptionError("--text is empty; give some text, or --data FILE")
    ids = encode_prompt(model, text)[:most]
    return TokenRows(tokens_NT=torch.tensor([ids]), targets_NT=None, tokenizer=model.tokenizer)


def _tokenizer(places: Sequence[TextSource], model: FathomForCausalLM) -> Any:
    """The model's own; a model without one takes a corpus', which has its own beside it."""
    corpora = [place for place in places if isinstance(place, Corpus)]
    tokenizer = model.tokenizer
    if tokenizer is None:
        if len(corpora) < len(places):
            raise OptionError("this model has no tokenizer, so it reads no text; give --data a prepared corpus")
        tokenizer = corpora[0].load_tokenizer()
    if not tokenizer.is_fast:
        raise DataError("only tokenizers that a tokenizer.json describes can read files, and this model's is none")
    for corpus in corpora:
        corpus.check_tokenizer(tokenizer)
    return tokenizer


def _take(places: Sequence[TextSource], tokenizer: Any, most: int, column: str) -> npt.NDArray[np.int64]:
    """The first `most` tokens of all places, or what there is."""
    parts: list[npt.NDArray[np.int64]] = []
    have = 0
    for part in (part for place in places for part in _pieces(place, tokenizer, most, column)):
        parts.append(part[: most - have])
        have += len(parts[-1])
        if have == most:
            break
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _pieces(place: TextSource, tokenizer: Any, most: int, column: str) -> Iterator[npt.NDArray[np.int64]]:
    if isinstance(place, Corpus):
        stream = place.stream("validation")
        yield stream.read(0, min(most, len(stream)))
        return
    encoder = Encoder(
        EncoderSettings(tokenizer=tokenizer.backend_tokenizer.to_str(), separator=_separator(tokenizer), dtype="int64")
    )
    for document in read(place, (column,)):
        (text,) = document.fields
        start = text[: LONG_TOKEN * most]
        ids = encoder.encode([(start,)]).ids
        if len(ids) <= most and len(start) < len(text):
            ids = encoder.encode([(text,)]).ids
        yield ids


def _separator(tokenizer: Any) -> int:
    try:
        return separator_id(tokenizer, None)
    except DataError as error:
        raise DataError(
            "the model's tokenizer names no token to end documents with; give a corpus made by `fathomlm data prepare "
            "--separator`"
        ) from error
