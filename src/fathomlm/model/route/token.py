"""Token-choice: each token picks its depth once (thesis 4.3.2). `depth.routing.token` is its pure half.

Shapes: B batch, T tokens of a sequence, M hidden width, R recursions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import NoCache
from fathomlm.depth import Routing
from fathomlm.kernels.rows import put, take
from fathomlm.model.attention_mask import TokenBatch
from fathomlm.model.route import RoutedWalk, Routers, draw, draw_keys
from fathomlm.model.route.trace import DepthControl, RoutingTrace, TopKOptions

SIZES = 8
"""Into how many sizes the tokens of a recursion are rounded up, where the data say how many they are."""


class TokenRouters(Routers):
    """One router, with an output for each depth."""

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__(hidden, routing, count=1, outputs=routing.recursions)
        if routing.balancing == "loss_free":
            self.bias = nn.Parameter(torch.zeros(routing.recursions), requires_grad=False)

    def choose(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> TokenPass:
        return TokenPass(self, x, rows, keep, control, trace)

    def train_walk(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, kv: NoCache, options: TopKOptions, trace: RoutingTrace | None
    ) -> Tensor:
        """Each recursion over the tokens that chose to go so far, gathered into shapes of a few sizes; the host asks the
        device once how many they are. Tokens that go on stand first in their row, in order, and surplus behind them, where
        causal attention does not look: nobody needs a mask, unless documents or windows ask for one. A recursion that
        nobody chose runs surplus, so that all ranks make the same calls."""
        choice = walk.choice(x, rows, DepthControl(), trace)
        assert isinstance(choice, TokenPass)
        T, first, own = x.shape[1], x, walk.plan.kv == "cache"
        masked = rows.documents_BT is not None or any(walk.architecture.window(step.origin) for step in walk.plan)
        _, scores = choice.decide(0, x)
        out = walk.block(0, x, rows.slots, rows.keep, rows, kv.focus(at_BK=rows.slots), selected=False)  # everyone's
        x = choice.updated(0, x, out, scores, first)
        for recursion, count in enumerate(choice.longest()[1:], start=1):
            go, scores = choice.decide(recursion, x)
            at = (~go).to(torch.int8).argsort(dim=1, stable=True)[:, : _rounded_up(count, T)]
            slots, valid = rows.slots.gather(1, at), go.gather(1, at)
            old = take(x, at)
            seen = valid if masked or not own else None
            out = walk.block(recursion, old, slots, seen, rows, kv.focus(at_BK=slots, valid_BK=valid), selected=True)
            new = choice.updated(recursion, old, out, take(scores, at), take(first, at), at)
            x = put(x, at, torch.where(valid[..., None], new, old))
        choice.note()
        return x

    def depth_logits(self, x_BNM: Tensor) -> Tensor:
        """what the router says of each depth, (B, N, R)."""
        out: Tensor = self.main[0](x_BNM)
        return out

    def last_recursion(self, scores_BNR: Tensor, depth_bias: float = 0.0) -> Tensor:
        """The recursion that each token stops behind, from 0, by the scores of all; `depth_bias` is `DepthControl.bias`."""
        ranked = scores_BNR.detach() if self.bias is None else scores_BNR.detach() + self.bias
        if depth_bias:
            ranked = ranked.clamp_min(1e-30).log() if self.routing.score == "softmax" else ranked
            ranked = ranked + depth_bias * torch.arange(self.routing.recursions, device=ranked.device)
        return ranked.argmax(-1)

    @classmethod
    def loss_names(cls, routing: Routing) -> tuple[str, ...]:
        return ("router", "router_z", *(f"load_{i + 1}" for i in range(routing.recursions)))

    @classmethod
    def losses(cls, trace: RoutingTrace, routing: Routing, keep_BT: Tensor, counted_B: Tensor) -> dict[str, Tensor]:
        """The balancing loss N sum_i f_i P_i of a row: f the part of the tokens that chose depth i, P its mean score."""
        assert trace.depth_scores_BTR is not None
        assert trace.depth_logits_BTR is not None
        assert trace.depths_BT is not None
        R = routing.recursions
        real = keep_BT.to(trace.depth_scores_BTR.dtype)
        many = real.sum(1).clamp_min(1)
        chose = F.one_hot((trace.depths_BT - 1).clamp_min(0), R) * real[..., None]
        share_BR = chose.sum(1) / many[:, None]
        mean_BR = (trace.depth_scores_BTR * real[..., None]).sum(1) / many[:, None]
        z_B = (trace.depth_logits_BTR.logsumexp(-1).square() * real).sum(1) / many
        loads = {f"load_{i + 1}": (counted_B * share_BR[:, i]).sum() for i in range(R)}
        balance = (counted_B * R * (share_BR * mean_BR).sum(1)).sum()
        return {"router": balance, "router_z": (counted_B * z_B).sum()} | loads


def drawn_depth(keys_BN: Tensor, recursions: int) -> Tensor:
    """Random routing: each token's last recursion, from 0 on, all equally likely."""
    return (draw(keys_BN, 0) * recursions).long().clamp_max(recursions - 1)


def _rounded_up(count: int, tokens: int) -> int:
    """A count of tokens as one of a few sizes, since each is compiled for itself."""
    size = -(-tokens // SIZES)
    return min(tokens, max(1, -(-count // size)) * size)


class TokenPass:
    """Decided once, on the stream that enters the first recursion."""

    def __init__(
        self,
        routers: TokenRouters,
        x: Tensor,
        rows: TokenBatch,
        keep: Tensor,
        control: DepthControl,
        trace: RoutingTrace | None,
    ) -> None:
        self._routing, self._rows, self._trace, self._keep = routers.routing, rows, trace, keep
        self._logits = routers.depth_logits(x)
        self._scores = routers.score(self._logits)
        if routers.routing.random:
            last = drawn_depth(draw_keys(rows), routers.routing.recursions)
        else:
            last = routers.last_recursion(self._scores, control.bias)
        last = last if control.depths_BT is None else control.depths_BT - 1
        self._last = last.clamp_max(control.recursions(routers.routing.recursions) - 1)

    def longest(self) -> list[int]:
        """The most tokens of a row that run each recursion."""
        ran_RBT = [self._keep & (self._last >= recursion) for recursion in range(self._routing.recursions)]
        found: list[int] = torch.stack([ran_BT.sum(1).amax() for ran_BT in ran_RBT]).tolist()
        return found

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._keep & (self._last >= recursion), self._scores

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, scores: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor:
        """The thesis' equation for token-choice: the last recursion adds the stream that entered the first."""
        routing = self._routing
        weight = (routing.alpha * scores[..., recursion])[..., None].to(x.dtype)
        last = (self._last if at is None else self._last.gather(1, at)) == recursion
        if routing.weighting == "every":
            return weight * out + torch.where(last[..., None], first, 0.0)
        return torch.where(last[..., None], first + weight * out, out)

    def note(self) -> None:
        if self._trace is None:
            return
        self._trace.depth_logits_BTR, self._trace.depth_scores_BTR = self._logits, self._scores
        self._trace.depths_BT, self._trace.keep_BT = (self._last + 1) * self._keep, self._rows.keep
