"""How well a model predicts text: in nats per token, as perplexity, and in bits per byte, which tokenizers do not change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fathomlm.errors import DataError
from fathomlm.lab.evaluate.encoding import Pair, TextEncoder, windows
from fathomlm.lab.evaluate.scoring import OnProgress, Scorer, perplexity_of

BLANK_LINE = "\n\n"
AT_ONCE = 256
"""Documents that are tokenised together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPerplexity:
    """What one output makes of some text."""

    nats: float
    """The negative log-likelihood of all scored tokens."""
    tokens: int
    """Those that were scored."""
    bytes: int
    """Of the text, in UTF-8."""
    documents: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity_of(-self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def record(self) -> dict[str, Any]:
        names = ("documents", "tokens", "bytes", "nats_per_token", "perplexity", "bits_per_byte")
        return {name: getattr(self, name) for name in names}


def predict(
    scorer: Scorer,
    encoder: TextEncoder,
    texts: Iterable[str],
    *,
    stride: int | None = None,
    join: bool = False,
    on_done: OnProgress | None = None,
) -> list[TextPerplexity]:
    """Each output's figures for some documents, each by itself behind the begin token; `join` makes one of them, with blank
    lines between, as is usual for WikiText. `stride` is how many new tokens a window scores: the fewer, the more context
    each has, and the longer it takes."""
    documents = [BLANK_LINE.join(texts)] if join else [text for text in texts if text]
    pairs: list[Pair] = []
    for at in range(0, len(documents), AT_ONCE):
        for tokens in encoder.encode_plain(documents[at : at + AT_ONCE]):
            pairs += windows(tokens, prefix=encoder.prefix, length=scorer.max_length, stride=stride)
    if not pairs:
        raise DataError("there is no text to predict")
    size, many = sum(len(text.encode("utf-8")) for text in documents), sum(len(pair.continuation) for pair in pairs)
    return [
        TextPerplexity(
            nats=-sum(score.log_likelihood for score in scores), tokens=many, bytes=size, documents=len(documents)
        )
        for scores in scorer.score(pairs, on_done)
    ]
