"""Tokenizing prompts off the event loop, a lower bound on a prompt's token count, and tokens as strings and bytes.

A text that cannot fit is refused before it is tokenized: a megabyte takes seconds to tokenize and a millisecond to count.
Prompts are tokenized by several threads (a fast tokenizer leaves Python to the others meanwhile), and short ones have
threads of their own, so that they never wait behind long ones.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from fathomlm.decode.byte_text import byte_letters, is_byte_level, letter_bytes

SHORT = 1 << 14
"""Characters, or token ids, up to which a prompt is short: it is tokenized in milliseconds."""
WORKERS = 2
"""Threads for short prompts, and as many for long ones."""
KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that drop no character."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece vocabularies write a space."""
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece vocabularies write a single byte."""

T = TypeVar("T")


class TokenizerThreads:
    def __init__(self, tokenizer: Any | None) -> None:
        fast = tokenizer is None or tokenizer.is_fast
        if fast and tokenizer is not None:
            tokenizer("a", verbose=False)  # forgets a padding or truncation of its file, which no two threads may do at once
        self._short = ThreadPoolExecutor(WORKERS if fast else 1, "fathomlm-tokenizer")
        self._long = ThreadPoolExecutor(WORKERS, "fathomlm-long-tokenizer") if fast else self._short

    async def run(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Work on a prompt of this size, in a thread. A waiter that gives up cancels it, unless it has begun."""
        pool = self._short if size <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


class LeastTokens:
    """A lower bound on the token count of a string, from its bytes.

    Each byte weighs 1/L, where L is the length of the longest token that it is part of, so no token weighs more than one
    and the text has at least as many tokens as it weighs. That holds where each byte of the text is in some token: for BPE
    over bytes, or with bytes to fall back to. Other tokenizers drop characters, or take a whole word as unknown, and have
    no bound: 0.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._weights: Any = None
        self._strips = self._composes = self._byte_level = False
        if tokenizer is None or not tokenizer.is_fast:
            return
        found = json.loads(tokenizer.backend_tokenizer.to_str())
        model, added = found["model"], found.get("added_tokens") or ()
        normalizers, splitters = _flat(found.get("normalizer"), "normalizers"), _flat(
            found.get("pre_tokenizer"), "pretokenizers"
        )  # fmt: skip
        self._byte_level = any(one["type"] == "ByteLevel" for one in splitters)
        vocab = model.get("vocab")
        if model.get("type") != "BPE" or not all(map(_drops_none, splitters)) or not all(map(_shrinks_none, normalizers)):
            return
        if not (set(byte_letters()) if self._byte_level else {f"<0x{byte:02X}>" for byte in range(256)}) <= set(vocab):
            return
        self._strips = any(one["lstrip"] or one["rstrip"] for one in added)
        self._composes = any(one["type"] == "NFC" for one in normalizers)
        pieces = {*map(self._piece, vocab), *(self._plain(one["content"]) for one in added)}
        self._weights = _weights(pieces)

    def __call__(self, text: str) -> int:
        if self._weights is None:
            return 0
        if self._strips:  # a special token may take all the spaces around it
            text = "".join(text.split())
        if self._composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        counts = np.bincount(np.frombuffer(self._plain(text), np.uint8), minlength=256)
        return int(counts @ self._weights * (1 - 1e-9))

    def _piece(self, piece: str) -> bytes:
        own = letter_bytes(piece) if self._byte_level else None
        return self._plain(piece) if own is None else own

    def _plain(self, text: str) -> bytes:
        return (text if self._byte_level else text.replace(SPACE, " ")).encode("utf-8", "surrogatepass")


def _weights(pieces: Iterable[bytes]) -> Any:
    longest: dict[int, int] = {}
    for piece in sorted(pieces, key=len, reverse=True):
        for byte in set(piece):
            longest.setdefault(byte, len(piece))
    return np.array([1 / longest.get(byte, 1) for byte in range(256)])


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[inner] for step in _flat(one, inner)]
    return [part]


def _drops_none(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in KEEPING or (
        splitter["type"] in ("Split", "Punctuation") and splitter.get("behavior") != "Removed"
    )


def _shrinks_none(normalizer: Mapping[str, Any]) -> bool:
    replaces = normalizer["type"] == "Replace"
    space = replaces and normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == SPACE
    return space or normalizer["type"] in ("NFC", "Prepend")


class TokenStrings:
    """The string of each token of a vocabulary. A part of a character has no string, but it has bytes."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer is not None and is_byte_level(tokenizer)
        self.text = lru_cache(1 << 16)(self._text)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of several, with special tokens."""
        if self._tokenizer is None:
            return "".join(map(self.text, tokens))
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def bytes(self, token: int) -> list[int] | None:
        """None without a tokenizer."""
        if self._tokenizer is None:
            return None
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if (single := BYTE_PIECE.fullmatch(piece)) is not None:
            return [int(single[1], 16)]
        own = letter_bytes(piece) if self._byte_level else None
        return list(self.text(token).encode() if own is None else own)
