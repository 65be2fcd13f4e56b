"""Expert-choice: each recursion picks tokens (thesis 4.3.2). `depth.routing.expert` is its pure half.

Shapes: B batch, T tokens of a sequence, N tokens that were asked, M hidden width, R recursions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import NoCache
from fathomlm.depth import Routing
from fathomlm.kernels.half import keeps_gradients
from fathomlm.kernels.rows import put, take
from fathomlm.model.attention_mask import TokenBatch
from fathomlm.model.route import RoutedWalk, Router, Routers, draw, draw_keys
from fathomlm.model.route.entrance import (
    PickedTokens,
    Quotas,
    enter_all,
    enter_some,
    pick,
    pick_within,
    rejoin,
    router_logits,
)
from fathomlm.model.route.trace import Decision, DepthControl, RoutingTrace, TopKOptions


class Entered(NamedTuple):
    """What a recursion works on in training."""

    before: Tensor
    """The stream of all tokens that were asked."""
    taken: Tensor
    """The stream of those that go on, for the recursion."""
    stays: Tensor
    """The same, for what is added to its outcome."""
    logits: Tensor
    """Of all tokens that were asked."""


def advance(x_BNM: Tensor, out_BNM: Tensor, scores_BN: Tensor, alpha: float, update: str) -> Tensor:
    """The stream after a recursion, x + g f(x) or x + g (f(x) - x), in the stream's dtype. The second is computed so
    that at g = 1 it is f(x) to the last bit."""
    wide = torch.promote_types(x_BNM.dtype, torch.float32)
    gate = alpha * scores_BN[..., None].to(wide)
    x, out = x_BNM.to(wide), out_BNM.to(wide)
    return (x + gate * out if update == "add" else (1 - gate) * x + gate * out).to(x_BNM.dtype)


PARTS: dict[str, Callable[..., Any]] = {
    "advance": advance, "router_logits": router_logits, "pick": pick, "pick_within": pick_within, "enter_all": enter_all,
    "enter_some": enter_some,
}  # fmt: skip
"""What training may compile."""


class ExpertRouters(Routers):
    """A router for each recursion."""

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__(hidden, routing, count=routing.recursions, outputs=1)
        beside = routing.recursions if routing.sampling == "aux_router" else 0
        self.aux = nn.ModuleList(Router(hidden, 1, routing.network) for _ in range(beside))
        self._parts = PARTS

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile what routers do to the stream between two passes of the block, for the shapes it is given."""
        self._parts = {name: torch.compile(part, dynamic=False, backend=backend) for name, part in PARTS.items()}

    @torch.no_grad()
    def open_all(self) -> None:
        """Routers that say 0 of every token: all of them go on, and with a sigmoid and alpha 2 each gate is 1, so that the
        model computes what the recursive one does, to the last bit. Small random weights would halve every recursion's
        step and send half of the tokens away at random."""
        if (self.routing.update, self.routing.score) == ("interpolate", "sigmoid"):
            for router in (*self.main, *self.aux):
                nn.init.zeros_(router.get_parameter("out.weight"))

    def choose(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> ExpertPass:
        return ExpertPass(self, rows, keep, control, trace)

    def train_walk(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, kv: NoCache, options: TopKOptions, trace: RoutingTrace | None
    ) -> Tensor:
        """The best k of each row, gathered: shapes depend on the capacity only, never on the data. It looks into the future
        to choose. Recursion r asks only the tokens that recursion r-1 kept.

        Capacities are of a row's real tokens. Where those differ from its length, shapes are the length's, and the surplus
        runs along unseen: nobody attends to it, and what comes of it is discarded.
        """
        T = x.shape[1]
        quotas = Quotas.of(self.routing, rows, options)
        slots, keep = rows.slots, rows.keep
        depths = torch.zeros_like(slots)
        left: list[tuple[Entered, PickedTokens]] = []
        for recursion in range(walk.plan.recursions):
            seen = self.seen(recursion, x)
            kept = self.routing.kept(recursion, T, options.openness)
            picked = None
            if quotas is not None and self.routing.capacity[recursion] < 1:
                within = quotas.at(recursion, slots)
                picked = self.pick(self._rank(recursion, seen, rows, slots), keep, kept, *within)
            elif kept < x.shape[1]:
                picked = self.pick(self._rank(recursion, seen, rows, slots), keep, kept)
            entered = self.enter(recursion, x, seen, picked)
            logits, candidates, candidate_slots = entered.logits, keep, slots
            judged = logits if trace is None else self.judge(recursion, x, logits)
            if picked is not None:
                slots, logits = slots.gather(1, picked.at_BN), logits.gather(1, picked.at_BN)
                keep = picked.valid_BN  # who is picked from a padded row is picked by quota
                left.append((entered, picked))
            if trace is not None:
                candidates = torch.ones_like(seen, dtype=torch.bool) if candidates is None else candidates
                chosen = candidates if picked is None else candidates & _chosen(picked)
                selective = self.routing.capacity[recursion] < 1
                trace.decisions.append(Decision(entered.logits, judged, chosen, candidate_slots, candidates, selective))
                depths = depths.scatter_add(1, slots, torch.ones_like(slots) if keep is None else keep.long())
            valid = None if picked is None else picked.valid_BN
            out = walk.block(recursion, entered.taken, slots, keep, rows, kv.focus(at_BK=slots, valid_BK=valid), bool(left))
            x = self.advance(entered.stays, out, logits)
            if valid is not None:
                x = torch.where(valid[..., None], x, entered.stays)
        for entered, picked in reversed(left):
            x = self.rejoin(entered, picked, x)
        if trace is not None:
            trace.depths_BT, trace.keep_BT = depths, rows.keep
        return x

    def logits(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """what a recursion's router says of each token, (B, N)."""
        out: Tensor = self.main[recursion](x_BNM)
        return out[..., 0]

    def seen(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """In training: `logits` to choose by. A linear router's have no gradient; `enter` knows theirs."""
        if self.routing.network != "linear":
            return self.logits(recursion, x_BNM)
        with torch.no_grad():
            seen_BN: Tensor = self._parts["router_logits"](x_BNM, self._weight(recursion))
        return seen_BN

    def pick(
        self,
        rank_BN: Tensor,
        keep_BN: Tensor | None,
        count: int,
        groups_BN: Tensor | None = None,
        quota_BN: Tensor | None = None,
    ) -> PickedTokens:
        """In training: who goes on. With quotas, at most as many of each group as its quota says."""
        with torch.no_grad():
            picked: PickedTokens
            if quota_BN is None:
                picked = self._parts["pick"](rank_BN.detach(), keep_BN, count)
            else:
                picked = self._parts["pick_within"](rank_BN.detach(), keep_BN, groups_BN, quota_BN, count)
        return picked

    def enter(self, recursion: int, x_BNM: Tensor, seen_BN: Tensor, picked: PickedTokens | None) -> Entered:
        """In training: the stream as it enters a recursion, all of it without `picked`."""
        if self.routing.network != "linear":
            taken = x_BNM if picked is None else take(x_BNM, picked.at_BN)
            return Entered(x_BNM, taken, taken, seen_BN)
        parts = self._parts if keeps_gradients(x_BNM) else PARTS
        if picked is None:
            first, second, logits = parts["enter_all"](x_BNM, self._weight(recursion), seen_BN)
            return Entered(first, first, second, logits)
        before, taken, logits = parts["enter_some"](x_BNM, self._weight(recursion), seen_BN, picked)
        return Entered(before, taken, taken, logits)

    def rejoin(self, entered: Entered, picked: PickedTokens, new_BNM: Tensor) -> Tensor:
        """In training: the stream with the tokens that went on replaced."""
        if self.routing.network != "linear":
            return put(entered.before, picked.at_BN, new_BNM)
        return rejoin(entered.before, picked.flat, new_BNM)

    def advance(self, x_BNM: Tensor, out_BNM: Tensor, logits_BN: Tensor) -> Tensor:
        """the stream after a recursion."""
        new: Tensor = self._parts["advance"](x_BNM, out_BNM, self.score(logits_BN), self.routing.alpha, self.routing.update)
        return new

    def judge(self, recursion: int, x_BNM: Tensor, logits_BN: Tensor) -> Tensor:
        """what decides at inference. An auxiliary router sees the stream but does not move it."""
        if not self.aux:
            return logits_BN
        out: Tensor = self.aux[recursion](x_BNM.detach())
        return out[..., 0]

    @classmethod
    def loss_names(cls, routing: Routing) -> tuple[str, ...]:
        return ("router", "router_z", "sampling_accuracy")

    @classmethod
    def losses(cls, trace: RoutingTrace, routing: Routing, keep_BT: Tensor, counted_B: Tensor) -> dict[str, Tensor]:
        """Binary cross entropy of what decides at inference against what the top k were, summed over recursions."""
        losses, squares = counted_B.new_zeros(()), counted_B.new_zeros(())
        for decision in trace.decisions:
            candidates = decision.candidates_BN.to(decision.judge_BN.dtype)
            each = F.binary_cross_entropy_with_logits(
                decision.judge_BN, decision.chosen_BN.to(candidates.dtype), reduction="none"
            )
            many = candidates.sum(1).clamp_min(1)
            losses = losses + (counted_B * (each * candidates).sum(1) / many).sum()
            squares = squares + (counted_B * (decision.logits_BN.square() * candidates).sum(1) / many).sum()
        return {"router": losses, "router_z": squares, "sampling_accuracy": agreement(trace, counted_B)}

    def _rank(self, recursion: int, seen_BN: Tensor, rows: TokenBatch, slots_BN: Tensor) -> Tensor:
        if not self.routing.random:
            return seen_BN
        return draw(draw_keys(rows).gather(1, slots_BN), recursion).to(seen_BN.dtype)

    def _weight(self, recursion: int) -> Tensor:
        router = self.main[recursion]
        assert isinstance(router, Router)
        return router.out.weight[0]


class ExpertPass:
    """The causal decisions of one pass."""

    def __init__(
        self, routers: ExpertRouters, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> None:
        self._routers, self._rows, self._control, self._trace = routers, rows, control, trace
        self._active = keep
        self._depths = torch.zeros_like(keep, dtype=torch.long)

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Who goes on: a token that went through the recursion before and whose score passes the threshold."""
        routers, candidates = self._routers, self._active
        logits = routers.logits(recursion, x)
        judged = routers.judge(recursion, x, logits)
        capacity = routers.routing.capacity
        selective = capacity[recursion] < 1  # the first recursion usually takes everyone, in training as here
        if self._control.depths_BT is not None:
            go = candidates & (self._control.depths_BT > recursion)
        elif not selective:
            go = candidates
        elif routers.routing.random:
            share = capacity[recursion] / (capacity[recursion - 1] if recursion else 1.0)
            go = candidates & (draw(draw_keys(self._rows), recursion) >= 1 - share)
        else:
            go = candidates & (judged + self._control.bias >= 0)
        if self._trace is not None:
            self._trace.decisions.append(Decision(logits, judged, go, self._rows.slots, candidates, selective))
        self._active = go
        self._depths = self._depths + go.long()
        return go, logits

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, scores: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor:
        return self._routers.advance(x, out, scores)

    def note(self) -> None:
        if self._trace is not None:
            self._trace.depths_BT, self._trace.keep_BT = self._depths, self._rows.keep


def _chosen(picked: PickedTokens) -> Tensor:
    """(B, T): the tokens that really go on."""
    taken_BT = picked.place_BT >= 0
    return taken_BT if picked.valid_BN is None else torch.zeros_like(taken_BT).scatter(1, picked.at_BN, picked.valid_BN)


def agreement(trace: RoutingTrace, counted_B: Tensor) -> Tensor:
    """Each row's sampling accuracy times its counted tokens, summed: a training step's share of the mean."""
    right = torch.zeros_like(counted_B)
    candidates = torch.zeros_like(counted_B)
    for decision in trace.decisions:
        if decision.selective:
            right = right + (((decision.judge_BN >= 0) == decision.chosen_BN) & decision.candidates_BN).sum(1)
            candidates = candidates + decision.candidates_BN.sum(1)
    return (counted_B * right / candidates.clamp_min(1)).sum()
