"""Each request's tokens to text, as they come back from the device: several at a time, many requests in turn."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from fathomlm.decode.text import TextStream
from fathomlm.errors import OptionError


class Detokeniser:
    """The text of one request. Without a tokenizer the text is empty and nothing ends it.

    The device runs ahead, so tokens behind a stop string may be pushed too. They are left alone: `taken` says how many
    were looked at, and `kept` how many of those the text is made of.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        """`context` is the prompt: the first token's space depends on its end."""
        if stop and tokenizer is None:
            raise OptionError("stop strings need a tokenizer, and this model has none")
        self.taken = 0
        """How many tokens were pushed, up to the one that completed a stop string."""
        self._stream = None if tokenizer is None else _MeasuredStream(tokenizer, stop=stop, context=context)
        self._shown = 0
        self._reached: list[int] | None = [] if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stream is not None and self._stream.stopped

    @property
    def kept(self) -> int:
        """How many of the tokens belong to the text: all, or where a stop string cut it the fewest that make it up.

        A token that a stop string begins inside of belongs to the text, for the part in front. Tokens of the stop string
        alone do not.
        """
        if self._reached is None or not self.stopped:
            return self.taken
        if self._shown == 0:
            return 0
        return min(bisect_left(self._reached, self._shown) + 1, self.taken)

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens in order; returns the text that is now safe to show, often empty."""
        if self._stream is None:
            self.taken += len(tokens)
            return ""
        pieces = []
        for token in tokens:
            if self._stream.stopped:
                break
            piece = self._stream.push(token)
            pieces.append(piece)
            self.taken += 1
            self._shown += len(piece)
            if self._reached is not None:
                self._reached.append(self._shown + self._stream.held)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest: the text ends here, so nothing needs to be held back."""
        if self._stream is None:
            return ""
        rest = self._stream.finish()
        self._shown += len(rest)
        return rest


class _MeasuredStream(TextStream):
    """A stream that tells how much text it holds back, so that text can be traced to the token that brought it."""

    @property
    def held(self) -> int:
        return len(self._held)
