"""How likely a model finds continuations, in batches: what every likelihood task, ours or another's, is made of; and how
well it predicts text, in nats per token, as perplexity, and in bits per byte, which tokenizers do not change.

Rows of a batch are alike in length, longest first, so that a bar's time left is never too short and memory runs out at once
or not at all. Requests that differ in their last token only share one row.

Shapes: B rows, T tokens, N scored positions, n some of them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.encoding import Pair, TextEncoder, windows
from fathomlm.lab.evaluate.outputs import FULL, Output, OutputStates, read_documents
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM

OnProgress = Callable[[int, int], None]
"""Called with how many are done, and of how many."""
DEFAULT_BATCH = 16
MOST_SCORES = 1 << 25
"""Scores over the vocabulary that are held at once, in float32: 128 MB."""


class Score(NamedTuple):
    log_likelihood: float
    """The sum of the continuation's log-probabilities, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely at its place."""


class Scorer:
    """One model, read at some outputs. Whatever shares a batch with a request, and however it is padded, its score is
    that of the request alone."""

    def __init__(
        self,
        model: FathomForCausalLM,
        outputs: Sequence[Output] = (FULL,),
        *,
        batch: int = DEFAULT_BATCH,
        max_length: int | None = None,
    ) -> None:
        """`max_length` stands in for the context that the model was trained for."""
        if batch < 1:
            raise OptionError(f"batch size must be >= 1, got {batch}")
        if max_length is not None and max_length < 1:
            raise OptionError(f"max length must be >= 1, got {max_length}")
        self.model = model
        self.outputs = tuple(outputs)
        self.batch = batch
        self.max_length = max_length or model.architecture.context

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], on_done: OnProgress | None = None) -> list[list[Score]]:
        """For each output, a score for each pair. What does not fit the context is cut off at the beginning."""
        rows = self._rows(pairs)
        order = sorted(rows, key=len, reverse=True)
        found: list[list[Score]] = [[Score(0.0, True)] * len(pairs) for _ in self.outputs]
        done = 0
        for at in range(0, len(order), self.batch):
            group = order[at : at + self.batch]
            requests = [(i, number) for i, row in enumerate(group) for number in rows[row]]
            continuations = [pairs[number].continuation for _, number in requests]
            for output, scores in enumerate(self._score_batch(group, [i for i, _ in requests], continuations)):
                for (_, number), score in zip(requests, scores, strict=True):
                    found[output][number] = score
            done += len(requests)
            if on_done is not None:
                on_done(done, len(pairs))
        return found

    def _rows(self, pairs: Sequence[Pair]) -> dict[tuple[int, ...], list[int]]:
        """What the model reads, and the requests that are answered there."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, pair in enumerate(pairs):
            if not pair.context or not pair.continuation:
                raise DataError("a request requires at least one context token and one continuation token")
            if len(pair.continuation) > self.max_length:
                raise DataError(
                    f"a continuation of {len(pair.continuation):,} tokens does not fit the context of {self.max_length:,}"
                )
            row = (*pair.context, *pair.continuation)[-(self.max_length + 1) : -1]
            vocab = self.model.architecture.vocab
            if (highest := max(*row, *pair.continuation)) >= vocab:
                raise DataError(
                    f"token {highest} is outside the model's vocabulary of {vocab:,}: the tokenizer is not its own"
                )
            rows.setdefault(row, []).append(number)
        return rows

    def _score_batch(
        self, group: Sequence[Sequence[int]], rows: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[list[Score]]:
        """For each output, a score for each continuation; `rows` says which row of the group it ends."""
        decoder = self.model.decoder
        device = decoder.embed.weight.device
        T = len(group[0])
        tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in group], device=device)
        places = [
            (row, slot, token)
            for row, targets in zip(rows, continuations, strict=True)
            for slot, token in enumerate(targets, start=len(group[row]) - len(targets))
        ]
        rows_N, slots_N, targets_N = torch.tensor(places, device=device).unbind(1)
        found: list[list[Score]] = [[] for _ in self.outputs]
        for read in read_documents(decoder, self.outputs, tokens_BT, rows_N, slots_N):
            likely, hit = _ask(decoder, read, targets_N)
            found[read.number] = _sums(likely, hit, [len(targets) for targets in continuations])
        return found


def _ask(decoder: Decoder, read: OutputStates, targets_N: Tensor) -> tuple[list[float], list[bool]]:
    """The targets' log-probabilities, and whether each is the most likely token at its place."""
    likely: list[float] = []
    hit: list[bool] = []
    step = max(1, MOST_SCORES // decoder.architecture.vocab)
    for begin in range(0, len(targets_N), step):
        part = slice(begin, begin + step)
        logits_nV, targets_n = read.logits(decoder, part), targets_N[part]
        likely += logits_nV.float().log_softmax(-1).gather(1, targets_n[:, None])[:, 0].tolist()
        hit += (logits_nV.argmax(-1) == targets_n).tolist()
    return likely, hit


def _sums(likely: Sequence[float], hit: Sequence[bool], sizes: Sequence[int]) -> list[Score]:
    ends = list(accumulate(sizes))
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [Score(math.fsum(likely[span]), all(hit[span])) for span in spans]


def perplexity_of(mean: float) -> float:
    """exp of the negative mean log-likelihood; infinite where that is beyond a float."""
    return math.exp(-mean) if -mean < 700 else math.inf


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
