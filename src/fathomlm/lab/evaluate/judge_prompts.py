"""The prompts of a judge, and parsing its answers.

The templates are those of the thesis (`fig_free:likert_scale_pairwise_comp`), as printed. It does not print what form the
scores should come in, and a score that has to be searched for would be a guess: the Likert template here ends with a line
that asks for one. Ambiguous answers are None, never a guess.

What is judged: a source, and one or two systems' completions of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fathomlm.errors import DataError, OptionError
from fathomlm.fields import Fields
from fathomlm.lab.evaluate.tasks import read_rows, stem

DIMENSIONS = ("relevance", "informativeness", "fluency", "coherence")
LIKERT = (
    "Evaluate the quality of summaries written for a news article. Rate each summary on {count} dimensions: {dimensions}. "
    "You should rate on a scale from 1 (worst) to 5 (best).\n\n"
    "Article: {source}\nSummary: {text}\n\n"
    "Answer with one line for each dimension, its name, a colon and a whole number:\n{form}"
)
PAIRWISE = (
    'Given a new article, which summary is better? Answer "Summary 0" or "Summary 1". You do not need to explain the '
    "reason.\n\nArticle: {source}\nSummary 0: {text_0}\nSummary 1: {text_1}"
)
_FIELD = re.compile(r"\{(\w+)\}")
_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Verdict = Literal["first", "second", "tie"]
"""Which of two completions is better, by the order in which they were shown."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Texts with {fields}. `{source}` and `{text}`, or `{text_0}` and `{text_1}`, must be among them."""

    likert: str = LIKERT
    pairwise: str = PAIRWISE
    dimensions: tuple[str, ...] = DIMENSIONS

    def __post_init__(self) -> None:
        if not self.dimensions or len({name.lower() for name in self.dimensions}) != len(self.dimensions):
            raise OptionError(f"--dimensions must be different names, got {', '.join(self.dimensions) or 'none'}")
        if len(self.dimensions) >= len(_COUNTS):
            raise OptionError(f"--dimensions must be at most {len(_COUNTS) - 1}, got {len(self.dimensions)}")
        _check("Likert", self.likert, {"source", "text"}, {"dimensions", "count", "form"})
        _check("pairwise", self.pairwise, {"source", "text_0", "text_1"}, set())

    def scores(self, source: str, text: str) -> str:
        """Asks for scores of one text."""
        fields = {
            "source": source,
            "text": text,
            "count": _COUNTS[len(self.dimensions)],
            "dimensions": _listed(self.dimensions),
            "form": "\n".join(f"{name.capitalize()}: <number>" for name in self.dimensions),
        }
        return _fill(self.likert, fields)

    def better(self, source: str, first: str, second: str) -> str:
        """Asks which of two texts is better."""
        return _fill(self.pairwise, {"source": source, "text_0": first, "text_1": second})


def _check(what: str, template: str, needed: set[str], known: set[str]) -> None:
    found = set(_FIELD.findall(template))
    if lacking := sorted(needed - found):
        raise OptionError(f"the {what} template is missing {', '.join(f'{{{name}}}' for name in lacking)}")
    if strange := sorted(found - needed - known):
        fields = ", ".join(f"{{{name}}}" for name in sorted(needed | known))
        raise OptionError(f"the {what} template has {{{strange[0]}}}, which nothing fills; known: {fields}")


def _fill(template: str, fields: dict[str, str]) -> str:
    """In one go, so that braces within a source or a text stay what they are."""
    return _FIELD.sub(lambda found: fields[found[1]], template)


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def read_scores(answer: str, dimensions: Sequence[str]) -> dict[str, int] | None:
    """Integer points from 1 to 5 for every dimension; None where one is missing, contradictory or off the
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
    scores = {_on_scale(found) for found in re.finditer(pattern, answer, re.IGNORECASE)}
    return scores.pop() if len(scores) == 1 else None


def _on_scale(found: re.Match[str]) -> int | None:
    if "." in found["points"] or (found["most"] is not None and int(found["most"]) != HIGHEST):
        return None
    points = int(found["points"])
    return points if LOWEST <= points <= HIGHEST else None


SOURCES = ("source", "prompt")
"""Fields that may hold the source, in the order in which they are tried."""
OUTPUTS = ("text", "output")
"""Fields that may hold a system's text; `fathomlm eval generate --out` writes `text`."""
BOTH = ("output_a", "output_b")
"""Fields of a file that holds two systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """One source, and what the systems wrote for it."""

    number: int
    """Its place in the file, from 0."""
    source: str
    texts: tuple[str, ...]
    """One for each system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedOutputs:
    """All rows, and what the systems are called."""

    systems: tuple[str, ...]
    rows: tuple[JudgedRow, ...]


def read_outputs(
    paths: Sequence[Path],
    *,
    source: str | None = None,
    outputs: Sequence[str] = (),
    names: Sequence[str] = (),
    limit: int | None = None,
    draw: int | None = None,
    seed: int = 0,
) -> JudgedOutputs:
    """One file with one or two systems, or two files with one each, which must have the same sources line by line.

    `limit` takes the first rows; `draw` takes so many at random, the same ones for the same seed.
    """
    if not 1 <= len(paths) <= 2:
        raise OptionError(f"one or two files can be judged, got {len(paths)}")
    files = [read_rows(path, limit) for path in paths]
    fields = [_fields(rows[0], source, outputs, alone=len(paths) == 1) for rows in files]
    columns = [[row.text(name) for row in rows] for rows, (_, texts) in zip(files, fields, strict=True) for name in texts]
    sources = [[_source(row, where) for row in rows] for rows, (where, _) in zip(files, fields, strict=True)]
    if len(paths) == 2:
        _check_alike(paths, sources)
    rows = tuple(
        JudgedRow(number=number, source=text, texts=texts)
        for number, (text, *texts_) in enumerate(zip(sources[0], *columns, strict=True))
        if (texts := tuple(texts_))
    )
    if draw is not None and draw < len(rows):
        rows = tuple(rows[number] for number in sorted(random.Random(seed).sample(range(len(rows)), draw)))
    return JudgedOutputs(systems=_systems(paths, fields[0][1], names), rows=rows)


def _fields(first: Fields, source: str | None, outputs: Sequence[str], *, alone: bool) -> tuple[str, tuple[str, ...]]:
    """Which fields hold the source and the systems' texts."""
    where = source or next((name for name in SOURCES if name in first), None)
    if outputs:
        if len(outputs) > (2 if alone else 1):
            raise OptionError("--output names one field of each of two files, or two fields of one file")
        found: tuple[str, ...] = tuple(outputs)
    elif alone and all(name in first for name in BOTH):
        found = BOTH
    else:
        found = tuple(name for name in OUTPUTS if name in first)[:1]
    if where is None or not found:
        raise OptionError(
            f"{first.where} has the fields {', '.join(first) or '(none)'}; set --source and --output, the fields with "
            "the source and the completion"
        )
    return where, found


def _source(row: Fields, name: str) -> str:
    text = row.text(name)
    if not text.strip():
        raise DataError(f"{row.where}: '{name}' is empty, so there is nothing to judge a text by")
    return text


def _check_alike(paths: Sequence[Path], sources: Sequence[Sequence[str]]) -> None:
    first, second = sources
    if len(first) != len(second):
        raise DataError(f"{paths[0]} has {len(first)} rows and {paths[1]} {len(second)}; both must answer the same sources")
    wrong = next((number for number, (one, two) in enumerate(zip(first, second, strict=True)) if one != two), None)
    if wrong is not None:
        raise DataError(f"row {wrong + 1} of {paths[0]} and of {paths[1]} have different sources")


def _systems(paths: Sequence[Path], fields: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    many = max(len(paths), len(fields))
    if names:
        if len(names) != many or len(set(names)) != many:
            raise OptionError(f"--names must give {many} different name{'s' * (many > 1)}, got {', '.join(names)}")
        return tuple(names)
    if len(paths) == 1:
        return tuple(fields) if many == 2 else (stem(paths[0]),)
    stems = tuple(stem(path) for path in paths)
    return stems if stems[0] != stems[1] else ("first", "second")
