"""One row of a batch while its tokens leave early: the text so far, what waits for the deeper layers, and how it draws.

Shapes: M hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.cache import Span
from fathomlm.decode.logits import chances, likeliest, pick, seen_tokens
from fathomlm.decode.rows import Leave, Row
from fathomlm.decode.sampling import Sampling


@dataclass(slots=True)
class Waiting:
    """A token that has run the layers up to the exit and not yet those behind it."""

    slot: int
    state_M: Tensor
    """The residual stream at the exit, before the final norm."""
    logits_V: Tensor
    """The exit's scores for what comes next."""
    likeliest: int
    leave: Leave
    chosen: int | None = None
    """What was chosen at the exit; None where the whole model is to choose."""


class Line:
    """A row and its place in the batch. `text` is the prompt, the tokens and behind them drafts that are not settled."""

    def __init__(self, index: int, row: Row, sampling: Sampling, generators: list[torch.Generator]) -> None:
        """`generators` is the row's one random generator, or none where nothing is random."""
        self.index = index
        self.row = row
        self.sampling = sampling
        self.text = list(row.prompt)
        self.stack: list[Waiting] = []
        self.samples: list[tuple[float, bool]] = []
        """Confidences at an exit, each with whether the whole model's likeliest token was the same."""
        self.deep_passes = self.drafted = self.accepted = 0
        self._generators = generators

    @property
    def slot(self) -> int:
        """Where the text ends: the token there is the next to run."""
        return len(self.text) - 1

    @property
    def span(self) -> Span:
        return Span(self.index, self.slot, 1)

    @property
    def unsettled(self) -> int:
        """How many tokens of the text the row has not taken yet."""
        return len(self.text) - len(self.row.prompt) - len(self.row.tokens)

    def take(self, token: int, leave: Leave) -> None:
        """A token that stays, whatever comes."""
        self.text.append(token)
        self.row.take(token, leave=leave)

    def note_agreement(self, leave: Leave, agreed: bool) -> None:
        leave.agreement = agreed
        assert leave.confidence is not None
        self.samples.append((leave.confidence, agreed))

    def pick(self, logits_V: Tensor, slot: int) -> int:
        """The token that follows a slot, as the sampling says."""
        return int(pick(logits_V[None], self.sampling, self._generators, self._seen(logits_V, slot)))

    def likeliest(self, logits_V: Tensor, slot: int) -> int:
        """What a greedy choice would be."""
        return int(likeliest(logits_V[None], self.sampling, self._seen(logits_V, slot)))

    def chances(self, logits_V: Tensor, slot: int) -> Tensor:
        """The probabilities that a token is drawn with."""
        return chances(logits_V[None], self.sampling, self._seen(logits_V, slot))[0]

    def draw(self, weights_V: Tensor) -> int:
        """A token at random, as likely as its weight says."""
        return int(torch.multinomial(weights_V, 1, generator=self._generators[0]))

    def uniform(self) -> float:
        """A random number from 0 to below 1."""
        (generator,) = self._generators
        return float(torch.rand(1, generator=generator, device=generator.device))

    def _seen(self, logits_V: Tensor, slot: int) -> Tensor | None:
        """What the repetition penalty counts at a slot: the text up to it, drafts included, and nothing behind it."""
        return seen_tokens(self.sampling, [self.text[: slot + 1]], logits_V.shape[-1], logits_V.device)
