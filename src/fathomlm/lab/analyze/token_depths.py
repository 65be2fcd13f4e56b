"""Which tokens go deep: the mean depth at each token of the vocabulary (thesis 4.6.2, "the allocation of recursion depth").

Depth belongs to a token's place and serves the prediction of what follows. Deep does not mean hard to predict: in the
bundled model the tokens behind the deepest places are the easiest (docs/bundled-model.md). What depth does mean is what
recursions gain there: `depth_gain` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathomlm.cli.shown import token_text
from fathomlm.model.route import RoutingTrace

LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDepth:
    token: int
    text: str
    count: int
    mean_depth: float


class TokenDepths:
    """Adds up depths by token."""

    def __init__(self, vocab: int) -> None:
        self._counts_V = torch.zeros(vocab, dtype=torch.int64)
        self._depths_V = torch.zeros(vocab, dtype=torch.int64)

    def add(self, tokens_BT: Tensor, trace: RoutingTrace) -> None:
        assert trace.depths_BT is not None
        tokens, depths = tokens_BT.flatten().cpu(), trace.depths_BT.flatten().cpu()
        self._counts_V += tokens.bincount(minlength=len(self._counts_V))
        self._depths_V.scatter_add_(0, tokens, depths)

    def read(self, tokenizer: Any, seen: int) -> tuple[list[TokenDepth], list[TokenDepth]]:
        """The deepest and the shallowest of the tokens that occurred `seen` times; no token is in both lists."""
        often = (self._counts_V >= seen).nonzero().flatten().tolist()
        means = {token: int(self._depths_V[token]) / int(self._counts_V[token]) for token in often}
        ranked = sorted(often, key=lambda token: (-means[token], -int(self._counts_V[token]), token))
        most = min(LISTED, -(-len(ranked) // 2))
        least = min(LISTED, len(ranked) - most)
        chosen = ranked[:most], ranked[len(ranked) - least :][::-1]
        deepest, shallowest = (
            [
                TokenDepth(
                    token=token,
                    text=token_text(tokenizer, token),
                    count=int(self._counts_V[token]),
                    mean_depth=means[token],
                )
                for token in group
            ]
            for group in chosen
        )
        return deepest, shallowest
