"""What a judge is asked.

The templates are those of the thesis (`fig_free:likert_scale_pairwise_comp`), as printed. It does not print what form the
scores should come in, and a score that has to be searched for would be a guess: the Likert template here ends with a line
that asks for one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fathomlm.errors import OptionError

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
        raise OptionError(f"the {what} template lacks {', '.join(f'{{{name}}}' for name in lacking)}")
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
