"""Tokens and depths as people see them: spaces and line ends marked, control characters spelled out, a color a depth.

Colours are matplotlib's viridis, whose lightness falls evenly, so that order shows without seeing hue: the deeper, the
darker. Letters are black or white, whichever stands out more: at least 4.5 to 1 on any background, which is what WCAG asks
of text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEWLINE, TAB, SPACE = "↵", "⇥", "␣"
PART = "·"
"""Stands for a token that ends within a character; the character stands with the token that completes it."""
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a mark of their own. Some of them would turn round the text that follows."""
_VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
_SHALLOW, _DEEP = 0.95, 0.25
"""The part of the scale that is used; its dark end would hide the page's text selection."""
NO_DEPTH = "#d0d0d0"
"""Tokens that ran no recursion at all."""


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


def depth_colours(recursions: int) -> list[str]:
    """The color of each depth from 0 to `recursions`."""
    fall = (_SHALLOW - _DEEP) / max(recursions - 1, 1)
    return [NO_DEPTH, *(_viridis(_SHALLOW - fall * depth) for depth in range(recursions))]


def ink(background: str) -> str:
    """Black or white, whichever can be read better on a background."""
    light = luminance(background)
    return "#000000" if (light + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def luminance(colour: str) -> float:
    """WCAG's relative luminance of a color, from 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in _parts(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _viridis(at: float) -> str:
    place = at * (len(_VIRIDIS) - 1)
    low = min(int(place), len(_VIRIDIS) - 2)
    pairs = zip(_parts(_VIRIDIS[low]), _parts(_VIRIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
