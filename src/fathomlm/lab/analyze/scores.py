"""Histograms of router scores, selected and unselected tokens apart (thesis 4.6.2; its appendix on router weights).

    expert   at each recursion, the score by which the causal rule would decide, over the tokens that were asked, split by
             what the top-k selection did. Where two humps do not overlap, causal decoding decides as training did.
    token    at each depth, the score that each token gave it, split by whether the token chose that depth.

Shapes: B rows, N tokens that were asked, T tokens, R recursions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.model.route import Routers, RoutingTrace

BINS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The scores of one recursion (expert) or one depth (token), from 1."""

    recursion: int
    takes_all: bool
    """expert: its capacity is 1, so it turned no token away."""
    edges: list[float]
    """The borders of the bins, one more than there are."""
    selected: list[int]
    unselected: list[int]
    selected_mean: float | None
    unselected_mean: float | None
    """None where there was no such token."""


class ScoreCounts:
    """Adds up scores over passes."""

    def __init__(self, routers: Routers, device: torch.device) -> None:
        self._routers = routers
        self._low = -1.0 if routers.routing.score in ("tanh", "identity") else 0.0
        R = routers.routing.recursions
        self._counts = torch.zeros(R, 2, BINS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(R, 2, dtype=torch.float64, device=device)

    def add(self, trace: RoutingTrace) -> None:
        for recursion, decision in enumerate(trace.decisions):
            score_BN = self._routers.score(decision.judge_BN)
            self._put(recursion, score_BN, decision.chosen_BN, decision.asked_BN)
        if trace.depth_scores_BTR is not None:
            assert trace.depths_BT is not None
            for recursion in range(trace.depth_scores_BTR.shape[-1]):
                chosen_BT = trace.depths_BT == recursion + 1
                self._put(recursion, trace.depth_scores_BTR[..., recursion], chosen_BT, trace.depths_BT > 0)

    def read(self) -> list[Histogram]:
        routing = self._routers.routing
        width = (1.0 - self._low) / BINS
        edges = [self._low + width * i for i in range(BINS)] + [1.0]
        counts, sums = self._counts.cpu(), self._sums.cpu()
        found = []
        for recursion in range(routing.recursions):
            (kept, left), means = counts[recursion].tolist(), []
            for side in range(2):
                total = float(counts[recursion, side].sum())
                means.append(float(sums[recursion, side]) / total if total else None)
            found.append(
                Histogram(
                    recursion=recursion + 1,
                    takes_all=routing.kind == "expert" and routing.capacity[recursion] >= 1,
                    edges=edges,
                    selected=[round(count) for count in kept],
                    unselected=[round(count) for count in left],
                    selected_mean=means[0],
                    unselected_mean=means[1],
                )
            )
        return found

    def _put(self, recursion: int, score_BN: Tensor, chosen_BN: Tensor, asked_BN: Tensor) -> None:
        for side, which_BN in enumerate((chosen_BN & asked_BN, ~chosen_BN & asked_BN)):
            scores = score_BN[which_BN].float()
            scores = scores[scores.isfinite()]
            self._counts[recursion, side] += torch.histc(
                scores.clamp(self._low, 1.0), BINS, self._low, 1.0
            )  # identity has no bounds
            self._sums[recursion, side] += scores.sum(dtype=torch.float64)


def threshold(routers: Routers) -> float | None:
    """The score from which on a token goes on at inference; None where no score decides."""
    routing = routers.routing
    if routing.kind == "token" or routing.random:
        return None
    return float(routers.score(torch.zeros(())))


def token_scores(routers: Routers, trace: RoutingTrace, row: int, at: int) -> list[float | None]:
    """What the router said of one token: at each recursion that it was asked at (expert), of each depth (token)."""
    if trace.depth_scores_BTR is not None:
        return [_finite(score) for score in trace.depth_scores_BTR[row, at].tolist()]
    return [
        _finite(float(routers.score(decision.judge_BN[row, at]))) if bool(decision.asked_BN[row, at]) else None
        for decision in trace.decisions
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
