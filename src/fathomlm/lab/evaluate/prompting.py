"""Prompts that are longer than a model reads."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel


def cut_prompt(model: FathomModel, tokens: Sequence[int], most: int) -> list[int]:
    """At most so many tokens. A decoder goes on from where its prompt ends, so that loses its beginning, but for a begin
    token; an encoder's loses its end, but for the end token that its tokenizer puts there (`train.data.pairs` cuts so)."""
    if len(tokens) <= most:
        return list(tokens)
    if isinstance(model, FathomForSeq2SeqLM):
        end = [tokens[-1]] if tokens[-1] == model.config.eos_token_id and most > 1 else []
        return [*tokens[: most - len(end)], *end]
    begin = [tokens[0]] if tokens[0] == model.config.bos_token_id and most > 1 else []
    return [*begin, *tokens[len(tokens) - (most - len(begin)) :]]
