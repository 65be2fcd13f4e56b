"""From scores to the next token: what a user may ask for, and the filters that carry it out.

The filters have the meaning and the order of transformers' logits processors of the same names, and are held against
them in tests/decode/test_sampling.py. They are ours because the engine will run them on the device inside its own step,
with each request's settings, where a chain of Python objects over one shared setting does not fit; and because
transformers counts padding as text that was already said when it penalises repetition, so that there a row's result
depends on its neighbours' lengths.

Shapes: B rows, V vocabulary. Every filter takes (V) or (B, V) and returns a new tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.errors import OptionError, choices, is_int, is_number, require

COLDEST = 1e-6
"""The lowest temperature that is not greedy; below it float32 scores lose their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens and when to end. The defaults are greedy: the likeliest token each time."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples from the model's own distribution; higher is more surprising."""
    top_k: int = 0
    """Sample among this many likeliest tokens only; 0 is no limit."""
    top_p: float = 1.0
    """Sample among the fewest tokens that together have at least this probability."""
    min_p: float = 0.0
    """Leave out tokens with less than this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the text so far become less likely; greedy choice heeds it too."""
    seed: int | None = None
    """Makes sampling repeatable. Each row starts from it anew, so equal prompts give equal texts."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    ignore_eos: bool = False
    """Go on past the model's end token, to `max_new_tokens`: for measurements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        for name in ("max_new_tokens", "top_k"):
            least = 1 if name == "max_new_tokens" else 0
            value = getattr(self, name)
            require(is_int(value) and value >= least, name, f"an integer >= {least}", value)
        t, p = self.temperature, self.repetition_penalty
        require(is_number(t) and (t == 0 or t >= COLDEST), "temperature", f"0 (greedy) or at least {COLDEST:g}", t)
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "> 0 and <= 1", self.top_p)
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        require(is_number(p) and 0.01 <= p <= 100, "repetition_penalty", "between 0.01 and 100 (1 is off)", p)
        seed = self.seed
        require(seed is None or (is_int(seed) and 0 <= seed < 2**63), "seed", "an integer from 0 to 2^63-1", seed)
        strings = all(isinstance(text, str) and text for text in self.stop)
        require(strings, "stop", "one or more strings that are not empty", self.stop)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False", self.ignore_eos)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_options(self, **options: object) -> Sampling:
        """A copy with some fields changed; a field that does not exist is an error that names the nearest one."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                raise OptionError(choices("sampling option", name, known))
        return dataclasses.replace(self, **options)  # type: ignore[arg-type]


def _as_tuple(stop: object) -> tuple[object, ...]:
    return tuple(stop) if isinstance(stop, list | tuple) else (stop,)


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
    """Only the fewest tokens whose probabilities sum to at least p, and always the likeliest (nucleus sampling)."""
    rising, order = logits.sort(dim=-1)
    drop_rising = rising.softmax(-1).cumsum(-1) <= 1 - p
    drop_rising[..., -1] = False
    drop = torch.empty_like(drop_rising).scatter_(-1, order, drop_rising)
    return logits.masked_fill(drop, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Only tokens with at least p times the likeliest one's probability."""
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
    rows = zip(chances(logits_BV, sampling, seen_BV), generators, strict=True)
    return torch.cat([torch.multinomial(row_V, 1, generator=generator) for row_V, generator in rows])


def likeliest(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """The greedy choice of each row, (B)."""
    return _penalised(logits_BV, sampling, seen_BV).argmax(-1)


def chances(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
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
