"""Tokens to text, piece by piece, as soon as each piece is safe to show.

Three things make this more than decoding one token at a time: a character may be spread over tokens, a SentencePiece
token's leading space shows only behind another token, and a stop string may begin in text that is about to be shown.

`TextStream` asks the tokenizer, and is the meaning. `ByteTextStream` looks tokens up in a table, where they are bytes.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""
LONGEST_CHARACTER = 4
"""UTF-8 characters have at most four bytes, so after this many tokens a broken end cannot be mended any more."""
WINDOW = 16
"""How many tokens to decode at a time before the oldest are let go."""
MOST = 3 * WINDOW
"""The longest window, for text that never comes to a clean end (a model that emits broken bytes only)."""
PROBES = 512
"""How many tokens of a vocabulary to compare with the tokenizer's own text before a table of them is trusted."""


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


class TokenBytes(dict[int, bytes]):
    """By token of a byte-level vocabulary: what it consists of; nothing for special tokens. Filled as tokens come."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._known = np.zeros(0, object)
        """The same by an array, None where a token was not asked for yet."""

    def __missing__(self, token: int) -> bytes:
        piece = "" if token in self._special else self._tokenizer.convert_ids_to_tokens(token) or ""
        own = letter_bytes(piece)
        self[token] = piece.encode() if own is None else own
        return self[token]

    def of(self, tokens: Tokens) -> bytes:
        """All of them at once, which is twice as quick as asking for each, and again if they are an array."""
        if not len(tokens):
            return b""
        try:
            return b"".join(self._known.take(tokens).tolist())
        except (IndexError, TypeError):  # a token that is not there yet
            here = sorted(set(as_list(tokens)))
            self._known = np.concatenate((self._known, np.full(max(0, here[-1] + 1 - len(self._known)), None)))
            for token in here:  # all at once they would become an array of bytes, which has no zeros at an end
                self._known[token] = self[token]
            return b"".join(self._known.take(tokens).tolist())


class TokenTable(dict[int, str | None]):
    """By token of such a vocabulary: its text, or None where it begins or ends inside a character."""

    def __init__(self, tokenizer: Any) -> None:
        self.bytes = TokenBytes(tokenizer)

    @classmethod
    def of(cls, tokenizer: Any | None) -> TokenTable | None:
        """The table of a tokenizer; None where texts are not the bytes of their tokens, one after another."""
        if tokenizer is None or not is_byte_level(tokenizer):
            return None
        table, vocab = cls(tokenizer), len(tokenizer)
        some = list(range(0, vocab, max(1, vocab // PROBES)))
        text = table.bytes.of(some).decode("utf-8", "replace")
        agrees = text == tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return table if agrees else None

    def __missing__(self, token: int) -> str | None:
        try:
            self[token] = self.bytes[token].decode()
        except UnicodeDecodeError:
            self[token] = None
        return self[token]


class ByteTextStream(TextStream):
    """The same by a table. A character is shown with its last byte, and bytes that are none at once."""

    def __init__(self, table: TokenTable, *, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._begin(stop)
        self._table = table
        end = table.bytes.of(context[-2 * LONGEST_CHARACTER :])
        self._rest = end[utf_8_decode(end, "replace", False)[1] :]
        """Of a character that has begun."""
        self._skips = len(utf_8_decode(self._rest, "replace", True)[0])
        """Where the prompt ends inside a character: that is the prompt's, and shown there as a broken one. Or as two: Python
        waits for what follows the first two bytes of a surrogate, which UTF-8 does not have."""

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        text = self._table[token]
        if text is None or self._rest:
            text = self._decode_on(self._table.bytes[token])
        return self._release(text) if self._stop else text

    def push_each(self, tokens: Sequence[int]) -> list[str]:
        if not self._stop and not self._rest:
            texts = list(map(self._table.__getitem__, tokens))
            if None not in texts:
                return texts  # type: ignore[return-value]
        return self._one_by_one(tokens)

    def push_all(self, tokens: Tokens) -> str:
        if self._stop:
            return "".join(self.push_each(as_list(tokens)))
        return self._decode_on(self._table.bytes.of(tokens))

    def finish(self) -> str:
        if self.stopped:
            return ""
        out = self._release(self._decode_on(b"", final=True)) + self._held
        self._held = ""
        return out

    def _decode_on(self, more: bytes, final: bool = False) -> str:
        data = self._rest + more
        text, used = utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        if self._skips and text:
            self._skips, text = 0, text[self._skips :]
        return text


def as_list(tokens: Tokens) -> Sequence[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else tokens


def is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer writes bytes as letters and joins them again, and does nothing else."""
    if not tokenizer.is_fast:
        return False
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    return [one.get("type") for one in decoder.get("decoders", [decoder])] == ["ByteLevel"]


@lru_cache(1)
def byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies: printable ones for themselves, then 256 and on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def letter_bytes(piece: str) -> bytes | None:
    """The bytes that a piece of such a vocabulary stands for; None where it has other letters too."""
    letters = byte_letters()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else None


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
