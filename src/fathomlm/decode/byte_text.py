"""The text of tokens that are bytes: byte-level vocabularies, read by a table instead of asking the tokenizer.

`ByteTextStream` says what `TextStream` (text.py) says.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fathomlm.decode.text import LONGEST_CHARACTER, TextStream, Tokens, as_list

PROBES = 512
"""How many tokens of a vocabulary to compare with the tokenizer's own text before a table of them is trusted."""

FEW = 2 * LONGEST_CHARACTER
"""Up to so many tokens, such as those in which the end of a prompt may have begun a character, each is asked for."""


class TokenBytes(dict[int, bytes]):
    """By token of a byte-level vocabulary: what it consists of; nothing for special tokens. Filled as tokens come, by one
    thread at a time. Tokens are not negative."""

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
        """All of them at once: for many twice as quick as asking for each, and again if they are an array."""
        if len(tokens) <= FEW:
            return b"".join(map(self.__getitem__, as_list(tokens)))
        numbers: Any = tokens
        try:
            return b"".join(self._known.take(numbers).tolist())
        except (IndexError, TypeError):  # a token that is not there yet
            here = set(as_list(tokens))
            if (most := max(here)) >= len(self._known):  # twice as long each time: what copies cost is shared by all tokens
                self._known = np.concatenate(
                    (self._known, np.full(max(most + 1, 2 * len(self._known)) - len(self._known), None))
                )
            for token in here:  # all at once they would become an array of bytes, which has no zeros at an end
                self._known[token] = self[token]
            return b"".join(self._known.take(numbers).tolist())


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
