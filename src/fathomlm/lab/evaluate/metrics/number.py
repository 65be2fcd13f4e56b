"""Whether a text comes to the right number, as in GSM8K (Cobbe et al. 2021): the one behind "####", or the last."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARK = "####"


def number(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    right = [
        (found := last_number(text)) is not None and any(found == last_number(reference) for reference in each)
        for text, each in zip(texts, references, strict=True)
    ]
    return {"exact_match": 100 * sum(right) / len(right)}


def last_number(text: str) -> float | None:
    """The number behind the mark, else the last of all; None where there is none."""
    _, mark, behind = text.rpartition(_MARK)
    if mark and (found := _NUMBER.search(behind)):
        return _value(found.group())
    every = _NUMBER.findall(text)
    return _value(every[-1]) if every else None


def _value(word: str) -> float:
    return float(word.replace(",", ""))
