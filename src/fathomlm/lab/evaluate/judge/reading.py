"""What a judge's words say. Words that do not say it plainly say nothing: None, never a guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["first", "second", "tie"]
"""Which of two texts is better, by the order in which they were shown."""
LOWEST, HIGHEST = 1, 5
_NUMBER = (
    r"(?P<points>\d+(?:\.\d+)?)(?![\d.]*\d)"
    r"(?:\s*(?:/|out\s+of)\s*(?P<most>\d+)(?!\d))?"
    r"(?!\s*(?:/|out\s+of|[-\u2013]|to|or)\s*\d)"
)
"""A number, and what it is out of; no range, and no part of a longer number."""
_MARKS = "[\\s\"'*_`]*"
_LABEL = r"(?:summary|text|answer|option|output|response|translation)\s*#?\s*(?P<label>[01])"
_PLAIN = re.compile(
    rf"(?:(?:my|the|final)\s+)*(?:(?:answer|choice|verdict)\s*(?:is)?\s*:?\s*)?"
    rf"(?:the\s+better\s+(?:one|\w+)\s+is\s*:?\s*)?(?:{_LABEL}|(?P<digit>[01]))[.!]?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(rf"{_LABEL}\s+is\s+(?:the\s+)?(?:slightly\s+|clearly\s+|much\s+)?(?:better|best)\b", re.IGNORECASE)
_TIE = re.compile(r"(?:it\s*i?s\s+a\s+|a\s+)?(?:tie|draw)[.!]?", re.IGNORECASE)


def read_scores(answer: str, dimensions: Sequence[str]) -> dict[str, int] | None:
    """Whole points from 1 to 5 for every dimension; None where one is missing, said twice in different ways or off the
    scale."""
    found = {name: _points(answer, name) for name in dimensions}
    return {name: points for name, points in found.items() if points is not None} if None not in found.values() else None


def read_verdict(answer: str) -> Verdict | None:
    """What the first line says. Reasons may follow it, but must not be needed to understand it."""
    line = next((line for line in answer.splitlines() if line.strip()), "")
    bare = re.sub(r"[\"'*_`]", "", line).strip()
    if _TIE.fullmatch(bare):
        return "tie"
    if (found := _PLAIN.fullmatch(bare)) is not None:
        return "first" if (found["label"] or found["digit"]) == "0" else "second"
    if (sentence := _SENTENCE.match(bare)) is not None:
        return "first" if sentence["label"] == "0" else "second"
    return None


def _points(answer: str, name: str) -> int | None:
    pattern = rf"(?<!\w){re.escape(name)}(?!\w){_MARKS}[:=]{_MARKS}{_NUMBER}"
    said = {_on_scale(found) for found in re.finditer(pattern, answer, re.IGNORECASE)}
    return said.pop() if len(said) == 1 else None


def _on_scale(found: re.Match[str]) -> int | None:
    if "." in found["points"] or (found["most"] is not None and int(found["most"]) != HIGHEST):
        return None
    points = int(found["points"])
    return points if LOWEST <= points <= HIGHEST else None
