"""Tokens as people see them: spaces and line ends marked, control characters spelled out."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEWLINE, TAB, SPACE = "↵", "⇥", "␣"
PART = "·"
"""Stands for a token that ends within a character; the character stands with the token that completes it."""
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a mark of their own. Some of them would turn round the text that follows."""


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, for a table."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
    return text


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to a text. Joined they are the text, with special tokens by their names."""
    from fathomlm.decode.text import TextStream

    special = frozenset(tokenizer.all_special_ids)
    stream = TextStream(tokenizer)
    found = []
    for token in tokens:
        piece = stream.push(token)
        found.append(piece + str(tokenizer.convert_ids_to_tokens(token)) if token in special else piece)
    if found:
        found[-1] += stream.finish()
    return found


def visible(piece: str) -> str:
    """A piece of running text with its line ends marked and kept; spaces stay spaces."""
    if not piece:
        return PART
    return "".join(_mark(letter, NEWLINE + "\n") for letter in piece)


def label(text: str) -> str:
    """A token in a table, where even its spaces matter."""
    return "".join(_mark(letter, NEWLINE) for letter in text).replace(" ", SPACE)


def _mark(letter: str, newline: str) -> str:
    if letter == "\n":
        return newline
    if letter == "\t":
        return TAB
    return f"⟨{ord(letter):02X}⟩" if unicodedata.category(letter) in UNSEEN else letter


def model_name(source: str) -> str:
    """A short name for a model: its last path part, with the run's for a checkpoint of one (tiny-last)."""
    path = Path(source).expanduser()
    if not path.exists():
        return source.replace("/", "-")
    if path.is_file():
        return path.stem
    parts = [part for part in path.absolute().parts if part != "checkpoints"]
    of_run = parts[-1] in ("last", "best") or parts[-1].startswith("step-")
    return "-".join(parts[-2:]) if of_run else parts[-1]


def command_note() -> str:
    """Where the command is, for a shell that would not find it: behind commands to be copied."""
    if shutil.which("fathomlm") is not None:
        return ""
    beside = Path(sys.executable).with_name("fathomlm")
    where = os.path.relpath(beside) if beside.is_file() else "python -m fathomlm"
    return f"\n(your shell does not find fathomlm; here it is {where})"
