"""Tokens to text, piece by piece, as soon as each piece is safe to show.

Three things make this more than decoding one token at a time: a character may be spread over tokens, a SentencePiece
token's leading space shows only behind another token, and a stop string may begin in text that is about to be shown.

`TextStream` asks the tokenizer, and is the meaning. Where tokens are bytes, `ByteTextStream` looks them up (byte_text.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TokenArray(Protocol):
    """What is asked of an array of integers: the scheduler imports this module, and needs no array library."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: slice, /) -> TokenArray: ...

    def tolist(self) -> list[int]: ...


Tokens = Sequence[int] | TokenArray
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""
LONGEST_CHARACTER = 4
"""UTF-8 characters have at most four bytes, so after this many tokens a broken end cannot be mended any more."""
WINDOW = 16
"""How many tokens to decode at a time before the oldest are let go."""
MOST = 3 * WINDOW
"""The longest window, for text that never comes to a clean end (a model that emits broken bytes only)."""


class TextStream:
    """The text of one row. `push` each token, show what comes back, then show what `finish` returns.

    Decodes a short window that starts where a whole piece of text started, and hands out what is new in it, so that a
    token costs the same however long the text is. `context` is the end of the prompt: the first token's space depends
    on it.
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._begin(stop)
        self._tokenizer = tokenizer
        self._window = self._opening(context)
        self._shown = len(self._decode(self._window))
        self._clean = len(self._window)

    def _begin(self, stop: Sequence[str]) -> None:
        self.stopped = False
        """Whether a stop string was met; nothing is handed out any more."""
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """Take one token; returns the text that is now safe to show, often empty."""
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        broken = text.endswith(REPLACEMENT)
        if not broken:
            ready = len(text)
        elif len(self._window) - self._clean < LONGEST_CHARACTER:
            ready = self._shown
        else:
            ready = len(text) - 1
        new = text[self._shown : ready]
        self._shown = max(self._shown, ready)
        self._slide(broken, held=len(text) - self._shown)
        return self._release(new)

    def push_each(self, tokens: Sequence[int]) -> list[str]:
        """Take some tokens: what is safe to show with each of them, as far as a stop string if one is met.

        Without stop strings all of it may come with the last: they are decoded together, since a tokenizer takes as long for
        one token as for many.
        """
        if not self._stop:
            return [""] * (len(tokens) - 1) + [self.push_all(tokens)] if tokens else []
        return self._one_by_one(tokens)

    def _one_by_one(self, tokens: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self.push(token))
            if self.stopped:
                break
        return pieces

    def push_all(self, tokens: Tokens) -> str:
        """The same as to push one token after another and to join what comes back, in fewer decodings."""
        tokens = as_list(tokens)
        if self._stop or len(tokens) == 1:
            return "".join(map(self.push, tokens))
        pieces: list[str] = []
        for first in range(0, len(tokens), WINDOW):
            block = tokens[first : first + WINDOW]
            text = self._decode([*self._window, *block])
            if text.endswith(REPLACEMENT):  # a character may go on behind the block
                pieces += map(self.push, block)
                continue
            pieces.append(text[self._shown :])
            self._window += block
            self._shown = len(text)
            self._slide(broken=False, held=0)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest: the text ends here, so nothing needs to be held back."""
        if self.stopped:
            return ""
        rest = self._decode(self._window)[self._shown :]
        out = self._release(rest) + self._held
        self._held = ""
        return out

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would change text that was shown already.
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _opening(self, context: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that decodes cleanly; it may not begin inside a character."""
        for length in range(LONGEST_CHARACTER, WINDOW + 1):
            tokens = list(context[-length:])
            text = self._decode(tokens)
            if text and REPLACEMENT not in text:
                break
        return tokens

    def _slide(self, broken: bool, held: int) -> None:
        """Let go of old tokens. What stays is the last piece that began and ended with whole characters, or of a broken end
        enough for the `held` characters of it that are not shown yet."""
        window = self._window
        if broken:
            if len(window) >= MOST:
                self._window = window[-2 * LONGEST_CHARACTER :]
                self._shown = len(self._decode(self._window)) - held
                self._clean = max(0, self._clean - len(window) + len(self._window))
            return
        if len(window) >= WINDOW:
            piece = window[self._clean :]
            text = self._decode(piece)
            if text or len(window) >= MOST:
                self._window, self._shown = piece, len(text)
        self._clean = len(self._window)

    def _release(self, new: str) -> str:
        """Text that no stop string can reach back into."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first wins, so that the cut does not depend on how the text came in tokens.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        safe = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[safe:]
        return text[:safe]


def as_list(tokens: Tokens) -> Sequence[int]:
    return tokens if isinstance(tokens, Sequence) else tokens.tolist()


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
