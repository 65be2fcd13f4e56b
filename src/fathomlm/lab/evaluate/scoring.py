"""How likely a model finds continuations, in batches: what every likelihood task, ours or another's, is made of; and how
well it predicts text, in nats per token, as perplexity, and in bits per byte, which tokenizers do not change.

Rows of a batch are alike in length, longest first, so that a bar's time left is never too short and memory runs out at once
or not at all. Requests that differ in their last token only share one row.

Shapes: B rows, T tokens, N scored positions, n some of them, V vocabulary.

A request is a context and its continuation, or a window of a long text. How it is tokenised follows lm-evaluation-harness,
so that scores can be compared: spaces at the end of a context belong to the continuation, both are tokenised as one text,
and an empty context is the model's begin token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.evaluate.outputs import FULL, Output, OutputStates, read_documents
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM

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
    def score(self, pairs: Sequence[Pair], on_done: OnProgress = unwatched) -> list[list[Score]]:
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
    on_done: OnProgress = unwatched,
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


TextPair = tuple[str, str]
"""A context and what follows it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens that are read, and behind them tokens that are scored."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)


class TextEncoder:
    """A model's tokenizer, asked as lm-evaluation-harness asks it."""

    def __init__(self, model: FathomForCausalLM) -> None:
        if model.tokenizer is None:
            raise OptionError("this model has no tokenizer, so it reads no text and cannot be evaluated on any")
        self.tokenizer: Any = model.tokenizer
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, model.config.bos_token_id)
        self.prefix: int | None = next((token for token in known if token is not None), None)
        """What stands before a text that has nothing in front."""
        self._begin = "" if self.prefix is None else self.tokenizer.decode([self.prefix])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with the special tokens that the tokenizer adds, unless a text begins with them already."""
        if not texts:
            return []
        ids: list[list[int]] = self._ids(texts, add_special_tokens=True)
        begun = [i for i, text in enumerate(texts) if self._begin and text.startswith(self._begin)]
        for i, again in zip(begun, self._ids([texts[i] for i in begun], add_special_tokens=False), strict=True):
            ids[i] = again
        return ids

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts alone."""
        return self._ids(texts, add_special_tokens=False)

    def pairs(self, texts: Sequence[TextPair]) -> list[Pair]:
        """Tokens of each context and continuation, in order."""
        moved = [_move_spaces(context, continuation) for context, continuation in texts]
        contexts = list(dict.fromkeys(context for context, _ in moved if context))
        of_context = dict(zip(contexts, self.encode(contexts), strict=True))
        joined = self.encode([context + continuation for context, continuation in moved if context])
        alone = self.encode_plain([continuation for context, continuation in moved if not context])
        in_context, by_itself = iter(joined), iter(alone)
        found = []
        for context, continuation in moved:
            pair = (
                _split(of_context[context], next(in_context)) if context else _begun(self._needed_prefix(), next(by_itself))
            )
            if not pair.continuation:
                raise DataError(f"nothing is left to score behind '{context[-40:]}': the continuation is {continuation!r}")
            found.append(pair)
        return found

    def _needed_prefix(self) -> int:
        if self.prefix is None:
            raise OptionError("a context is empty, and this model has neither a begin nor an end token to start from")
        return self.prefix

    def _ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        # Not verbose: transformers would warn about length, which the scorer deals with.
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids


def _move_spaces(context: str, continuation: str) -> TextPair:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def _split(context: Sequence[int], whole: Sequence[int]) -> Pair:
    """Where both are tokenised as one, a token may reach over the border; at least the last is scored."""
    border = min(len(context), len(whole) - 1)
    return Pair(tuple(whole[:border]), tuple(whole[border:]))


def _begun(prefix: int, continuation: Sequence[int]) -> Pair:
    if continuation and continuation[0] == prefix:
        return Pair((prefix,), tuple(continuation[1:]))
    return Pair((prefix,), tuple(continuation))


def windows(tokens: Sequence[int], *, prefix: int | None, length: int, stride: int | None = None) -> list[Pair]:
    """A text of any length in windows of `length` tokens. Each token is scored once.

    The first window scores all its tokens, each later one up to `stride` new ones (as many as fit by default) behind as much
    context as fits. `prefix` comes before the text; without one, the first token is read and not scored.
    """
    step = length if stride is None else stride
    if not 1 <= step <= length:
        raise OptionError(f"the stride must be from 1 to the window's {length} tokens, got {step}")
    row = tuple(tokens) if prefix is None else (prefix, *tokens)
    many, done, found = len(row) - 1, 0, []
    while done < many:
        end = min(many, done + (step if done else length))
        begin = max(0, end - length)
        found.append(Pair(row[begin : done + 1], row[done + 1 : end + 1]))
        done = end
    return found
