"""Single tokens as text and as bytes, for log probabilities."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece vocabularies write a single byte."""


class TokenTexts:
    """What each token of a vocabulary says by itself. A part of a character is no text, but it has bytes."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table() if tokenizer is not None and tokenizer.is_fast and _is_byte_level(tokenizer) else None
        self.text = lru_cache(1 << 16)(self._text)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def bytes(self, token: int) -> list[int] | None:
        """None without a tokenizer."""
        if self._tokenizer is None:
            return None
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if (single := BYTE_PIECE.fullmatch(piece)) is not None:
            return [int(single[1], 16)]
        table = self._table
        if table is not None and all(character in table for character in piece):
            return [table[character] for character in piece]
        return list(self.text(token).encode())


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in [decoder, *decoder.get("decoders", ())])


@lru_cache(1)
def byte_table() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones for themselves, then 256 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
