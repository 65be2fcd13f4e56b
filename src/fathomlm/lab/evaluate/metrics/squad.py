"""SQuAD's exact match and F1 (Rajpurkar et al. 2016): words in common after case, punctuation and articles are gone."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over texts; of several answers the best counts, for each number by itself."""
    exact = [max(exact_match(text, answer) for answer in each) for text, each in zip(texts, references, strict=True)]
    f1 = [max(word_f1(text, answer) for answer in each) for text, each in zip(texts, references, strict=True)]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}


def normalise(text: str) -> str:
    """In the order of SQuAD's own script: case, punctuation, articles, spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answer: str) -> float:
    return float(normalise(text) == normalise(answer))


def word_f1(text: str, answer: str) -> float:
    """Of words as often as they occur; two empty texts are alike, an empty and another are not."""
    mine, theirs = normalise(text).split(), normalise(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))
