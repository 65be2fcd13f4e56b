"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) as rouge-score counts them, with stemming; F-measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("rouge1", "rouge2", "rougeL")


def needed() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over texts; of several references the one counts that suits a text best, for each kind by itself."""
    scorer = needed()(list(KINDS), use_stemmer=True)
    best = [scorer.score_multi(list(each), text) for text, each in zip(texts, references, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in best) / len(best) for kind in KINDS}
