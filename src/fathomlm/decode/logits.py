"""From logits to the next token: the filters that carry out what `Sampling` asks for.

The filters have the meaning and the order of transformers' logits processors of the same names, and are held against
them in tests/decode/test_sampling.py. They are ours because the engine runs them on the device inside its own step, with
each request's settings, where a chain of Python objects over one shared setting does not fit; and because transformers
counts padding as repeated tokens when it penalizes repetition, so that there a row's result depends on its
neighbours' lengths.

Shapes: B rows, V vocabulary. Every filter takes (V) or (B, V) and returns a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.decode.sampling import Sampling


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores of tokens that were `seen` (boolean, same shape) moved towards unlikely: divided where positive,
    multiplied where negative (CTRL, Keskar et al. 2019, section 4.1)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Only the k highest scores; ties with the k-th stay."""
    kth = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Only the fewest tokens whose probabilities sum to at least p, and always the most likely (nucleus sampling)."""
    rising, order = logits.sort(dim=-1)
    drop_rising = rising.softmax(-1).cumsum(-1) <= 1 - p
    drop_rising[..., -1] = False
    drop = torch.empty_like(drop_rising).scatter_(-1, order, drop_rising)
    return logits.masked_fill(drop, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Only tokens with at least p times the most likely one's probability."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -math.inf)


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is left to sample from, in transformers' order: temperature, top-k, top-p, min-p."""
    # Softmax does not see a shift, and with the highest score at zero no temperature can overflow.
    out = apply_temperature(logits - logits.amax(-1, keepdim=True), sampling.temperature)
    if sampling.top_k:
        out = keep_top_k(out, sampling.top_k)
    if sampling.top_p < 1:
        out = keep_top_p(out, sampling.top_p)
    if sampling.min_p > 0:
        out = keep_min_p(out, sampling.min_p)
    return out


def pick(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator] = (), seen_BV: Tensor | None = None
) -> Tensor:
    """The next token of each row, (B).

    Sampling draws each row with its own generator, so that a row's result does not depend on its neighbours. `seen_BV`
    marks what the repetition penalty applies to; None leaves the penalty out.
    """
    if sampling.greedy:
        return likeliest(logits_BV, sampling, seen_BV)
    rows = zip(sampling_probabilities(logits_BV, sampling, seen_BV), generators, strict=True)
    return torch.cat([torch.multinomial(row_V, 1, generator=generator) for row_V, generator in rows])


def likeliest(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """The greedy choice of each row, (B)."""
    return _penalised(logits_BV, sampling, seen_BV).argmax(-1)


def sampling_probabilities(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """The probabilities that a sampled token is drawn with, (B, V); at temperature 0 those of the scores as they are."""
    scores_BV = _penalised(logits_BV, sampling, seen_BV).float()
    return (scores_BV if sampling.greedy else filter_logits(scores_BV, sampling)).softmax(-1)


def _penalised(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None) -> Tensor:
    return logits_BV if seen_BV is None else penalise_repetition(logits_BV.float(), seen_BV, sampling.repetition_penalty)


def row_generators(sampling: Sampling, rows: int, device: torch.device) -> list[torch.Generator]:
    """A random generator for each row, every one started from the seed; none where nothing is random."""
    if sampling.greedy:
        return []
    generators = [torch.Generator(device) for _ in range(rows)]
    for generator in generators:
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
    return generators


def seen_tokens(sampling: Sampling, rows: Sequence[Sequence[int]], vocab: int, device: torch.device) -> Tensor | None:
    """Which tokens each row's prompt holds, (B, V); None where no penalty asks for it. Padding is no part of a prompt."""
    if sampling.repetition_penalty == 1:
        return None
    seen_BV = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
    for seen_V, tokens in zip(seen_BV, rows, strict=True):
        seen_V[torch.tensor(tokens, device=device)] = True
    return seen_BV
