"""BLEU (Papineni et al. 2002) of a whole corpus as sacrebleu counts it: its 13a tokenizer, case as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def needed() -> Any:
    import sacrebleu

    return sacrebleu


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Texts may have different numbers of references."""
    most = max(len(each) for each in references)
    streams = [[each[i] if i < len(each) else None for each in references] for i in range(most)]
    return {"bleu": float(needed().corpus_bleu(list(texts), streams).score)}
