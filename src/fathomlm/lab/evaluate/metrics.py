"""The quality of completions against references, in points from 0 to 100.

rouge    ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) as rouge-score counts them, with stemming; F-measures
bleu     BLEU (Papineni et al. 2002) of a whole corpus as sacrebleu counts it: its 13a tokenizer, case as it is
squad    exact match and F1 of SQuAD (Rajpurkar et al. 2016): words in common without case, punctuation and articles
number   whether a text comes to the right number, as in GSM8K (Cobbe et al. 2021): the one behind "####", or the last
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from fathomlm.errors import OptionError, choices

ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARK = "####"


class Metric(Protocol):
    """Completions, and for each at least one reference; the metric's scores by name."""

    def __call__(self, completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]: ...


def rouge(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over completions; of several references the best counts, for each kind separately."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    best = [scorer.score_multi(list(each), text) for text, each in zip(completions, references, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in best) / len(best) for kind in ROUGES}


def bleu(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Completions may have different numbers of references."""
    import sacrebleu

    most = max(len(each) for each in references)
    streams = [[each[i] if i < len(each) else None for each in references] for i in range(most)]
    return {"bleu": float(sacrebleu.corpus_bleu(list(completions), streams).score)}


def squad(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over completions; of several answers the best counts, for each score separately."""
    exact = [max(exact_match(text, answer) for answer in each) for text, each in zip(completions, references, strict=True)]
    f1 = [max(word_f1(text, answer) for answer in each) for text, each in zip(completions, references, strict=True)]
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


def number(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    right = [
        (found := last_number(text)) is not None and any(found == last_number(reference) for reference in each)
        for text, each in zip(completions, references, strict=True)
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


METRICS: dict[str, Metric] = {"rouge": rouge, "bleu": bleu, "squad": squad, "number": number}
_PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu"}


def find_metric(name: str) -> Metric:
    """A metric that can be computed here; asked for before a model is loaded."""
    if name not in METRICS:
        raise OptionError(choices("metric", name, METRICS))
    if name in _PACKAGES:
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            raise OptionError(
                f"the metric {name} requires the package {error.name}: pip install 'fathomlm[eval]'"
            ) from error
    return METRICS[name]
