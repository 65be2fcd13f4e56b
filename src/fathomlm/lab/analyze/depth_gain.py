"""Is depth spent where it lowers the loss most? (thesis 4.6.2; the question behind its "easy" and "hard" tokens)

A token's depth serves the prediction of what follows it. Four losses are taken of every token: with one recursion for all,
with the depths that the routers decide, with the same depths dealt out anew at random within each sequence (so at exactly
the same cost), and with every recursion for all. What a token's own depth gained is the first less the second. What routing
is worth is the third less the second. Models are trained at their own depths, so the last is a look beyond what they know.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.model.route import DepthControl


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDepth:
    """Tokens that the routers send to one depth."""

    depth: int
    share: float
    one_loss: float
    """With one recursion for all tokens, in nats."""
    loss: float
    """With the depths that the routers decide."""
    full_loss: float
    """With every recursion for all tokens."""

    @property
    def gain(self) -> float:
        return self.one_loss - self.loss

    @property
    def full_gain(self) -> float:
        return self.one_loss - self.full_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGain:
    by_depth: list[OwnDepth]
    loss: float
    shuffled_loss: float
    """At the same depths dealt out at random within each row."""
    routing_gain: float
    """`shuffled_loss` less `loss`: what it is worth to choose, at equal cost."""
    routing_gain_error: float | None
    """Its standard error over rows; None of a single row."""
    correlation: float | None
    """Between a token's depth and what every recursion would gain it, over one (Pearson); None where depths are alike."""


class GainMeter:
    """Adds up losses by the depth that tokens chose."""

    def __init__(self, recursions: int, seed: int = 0) -> None:
        self._recursions = recursions
        self._generator = torch.Generator().manual_seed(seed)
        self._sums_R4 = torch.zeros(recursions + 1, 4, dtype=torch.float64)
        self._moments = torch.zeros(5, dtype=torch.float64)
        self._rows: list[float] = []
        self._shuffled = 0.0

    def add(self, losses: Callable[[DepthControl], Tensor], depths_BT: Tensor, one_BT: Tensor, own_BT: Tensor) -> None:
        """`losses` runs the batch under a control; `one_BT` and `own_BT` are losses that are known already."""
        full_BT = losses(DepthControl(depths_BT=torch.full_like(depths_BT, self._recursions))).double().cpu()
        order_BT = torch.rand(depths_BT.shape, generator=self._generator).argsort(1).to(depths_BT.device)
        shuffled_BT = losses(DepthControl(depths_BT=depths_BT.gather(1, order_BT))).double().cpu()
        depths, one_BT, own_BT = depths_BT.cpu(), one_BT.double().cpu(), own_BT.double().cpu()
        columns = torch.stack((torch.ones_like(own_BT), one_BT, own_BT, full_BT), -1).flatten(0, 1)
        self._sums_R4.index_add_(0, depths.flatten(), columns)
        deep, gain = depths.double().flatten(), (one_BT - full_BT).flatten()
        self._moments += torch.stack((deep.sum(), gain.sum(), (deep * deep).sum(), (gain * gain).sum(), (deep * gain).sum()))
        self._rows += (shuffled_BT - own_BT).mean(1).tolist()
        self._shuffled += float(shuffled_BT.mean(1).sum())

    def read(self) -> DepthGain:
        counts = self._sums_R4[:, 0]
        tokens, rows = float(counts.sum()), len(self._rows)
        by_depth = [
            OwnDepth(
                depth=depth,
                share=float(counts[depth]) / tokens,
                one_loss=float(self._sums_R4[depth, 1] / counts[depth]),
                loss=float(self._sums_R4[depth, 2] / counts[depth]),
                full_loss=float(self._sums_R4[depth, 3] / counts[depth]),
            )
            for depth in range(self._recursions + 1)
            if counts[depth]
        ]
        gains = torch.tensor(self._rows, dtype=torch.float64)
        error = None if rows < 2 else float(gains.std() / math.sqrt(rows))
        return DepthGain(
            by_depth=by_depth,
            loss=float(self._sums_R4[:, 2].sum()) / tokens,
            shuffled_loss=self._shuffled / rows,
            routing_gain=float(gains.mean()),
            routing_gain_error=error,
            correlation=self._correlation(tokens),
        )

    def _correlation(self, tokens: float) -> float | None:
        deep, gain, deep2, gain2, both = (float(moment) / tokens for moment in self._moments)
        spread = (deep2 - deep * deep) * (gain2 - gain * gain)
        return None if spread <= 1e-18 else (both - deep * gain) / math.sqrt(spread)
