"""Texts as tokens to be scored: a context and its continuation, or a long text in windows.

The rules are those of lm-evaluation-harness, so that scores can be compared: spaces at the end of a context belong to the
continuation, both are tokenised as one text, and an empty context is the model's begin token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.errors import DataError, OptionError
from fathomlm.model.hub import FathomForCausalLM

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
