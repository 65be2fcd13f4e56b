"""What is added up while text runs through a routed model: router scores, depths by token, and losses by depth.

Scores (thesis 4.6.2; its appendix on router weights) are kept apart for selected and unselected tokens:

    expert   at each recursion, the score by which the causal rule would decide, over the tokens that were asked, split by
             what the top-k selection did. Where two humps do not overlap, causal decoding decides as training did.
    token    at each depth, the score that each token gave it, split by whether the token chose that depth.

Depths by token say which tokens of the vocabulary go deep (thesis 4.6.2, "the allocation of recursion depth"). Depth belongs
to a token's place and serves the prediction of what follows. Deep does not mean hard to predict: in the bundled model the
tokens behind the deepest places are the easiest (docs/bundled-model.md). What depth does mean is what recursions gain there.

Losses by depth ask whether depth is spent where it lowers the loss most (the question behind the thesis' "easy" and "hard"
tokens). Four losses are taken of every token: with one recursion for all, with the depths that the routers decide, with the
same depths dealt out anew at random within each sequence (so at exactly the same cost), and with every recursion for all.
What a token's own depth gained is the first less the second. What routing is worth is the third less the second. Models are
trained at their own depths, so the last is a look beyond what they know.

Shapes: B rows, N tokens that were asked, T tokens of a row, R recursions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathomlm.cli.display import token_text
from fathomlm.model.route import DepthControl, Routers, RoutingTrace

BINS = 40
"""Of a histogram of scores."""
LISTED = 20
"""Deepest and shallowest tokens, of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreHistogram:
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
            self._put(recursion, score_BN, decision.chosen_BN, decision.candidates_BN)
        if trace.depth_scores_BTR is not None:
            assert trace.depths_BT is not None
            for recursion in range(trace.depth_scores_BTR.shape[-1]):
                chosen_BT = trace.depths_BT == recursion + 1
                self._put(recursion, trace.depth_scores_BTR[..., recursion], chosen_BT, trace.depths_BT > 0)

    def read(self) -> list[ScoreHistogram]:
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
                ScoreHistogram(
                    recursion=recursion + 1,
                    takes_all=routing.method.picks_tokens and routing.capacity[recursion] >= 1,
                    edges=edges,
                    selected=[round(count) for count in kept],
                    unselected=[round(count) for count in left],
                    selected_mean=means[0],
                    unselected_mean=means[1],
                )
            )
        return found

    def _put(self, recursion: int, score_BN: Tensor, chosen_BN: Tensor, candidates_BN: Tensor) -> None:
        for side, which_BN in enumerate((chosen_BN & candidates_BN, ~chosen_BN & candidates_BN)):
            scores = score_BN[which_BN].float()
            scores = scores[scores.isfinite()]
            self._counts[recursion, side] += torch.histc(
                scores.clamp(self._low, 1.0), BINS, self._low, 1.0
            )  # identity has no bounds
            self._sums[recursion, side] += scores.sum(dtype=torch.float64)


def threshold(routers: Routers) -> float | None:
    """The score from which on a token goes on at inference; None where no score decides."""
    routing = routers.routing
    if not routing.method.picks_tokens or routing.random:
        return None
    return float(routers.score(torch.zeros(())))


def token_scores(routers: Routers, trace: RoutingTrace, row: int, at: int) -> list[float | None]:
    """The router's scores of one token: at each recursion that it reached (expert), of each depth (token)."""
    if trace.depth_scores_BTR is not None:
        return [_finite(score) for score in trace.depth_scores_BTR[row, at].tolist()]
    return [
        _finite(float(routers.score(decision.judge_BN[row, at]))) if bool(decision.candidates_BN[row, at]) else None
        for decision in trace.decisions
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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

    def __init__(self, recursions: int) -> None:
        self._recursions = recursions
        self._generator = torch.Generator().manual_seed(0)
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
