"""The routed core: recursions of one block, each over the tokens that go on (thesis 4.3).

Four walks that agree where they overlap:

    top_k     training, expert-choice: the best k of each row, gathered, so that the compute saved is really saved. Shapes
              depend on the capacity only, never on the data. It looks into the future to choose.
    by_depth  training, token-choice: each recursion over the tokens that chose to go so far, gathered into shapes of a few
              sizes. The host asks the device once how many they are.
    whole     causal and slow: every token runs every recursion, and a mask discards what it should not have run. The
              meaning of routed inference, and of by_depth.
    cached    causal and with a cache: the tokens that go on are gathered, and only they leave entries.

Shapes: B rows, T tokens of the pass, N tokens that run a recursion, M hidden width, R recursions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fathomlm.cache import NoCache, RoutedCache
from fathomlm.depth import Architecture, DepthPlan, Routing, Step
from fathomlm.errors import OptionError
from fathomlm.kernels.rows import put, take
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.route.entrance import Picked
from fathomlm.model.route.quota import Quotas
from fathomlm.model.route.routers import Entered, Routers, draw, draw_key, drawn_depth
from fathomlm.model.route.trace import Decision, DepthControl, RoutingTrace, TopKOptions

SIZES = 8
"""Into how many sizes the tokens of a recursion are rounded up, where the data say how many they are."""


class RunSteps(Protocol):
    """Runs some steps of the plan over a stream."""

    def __call__(self, x: Tensor, steps: tuple[Step, ...], masks: AttentionMasks, kv: NoCache | RoutedCache) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RoutedWalk:
    """The core of one model; `run` is the decoder's own walk over steps."""

    architecture: Architecture
    plan: DepthPlan
    routers: Routers
    run: RunSteps
    see: Callable[..., AttentionMasks] = gathered_masks
    """`gathered_masks`, or a compiled form of it."""

    @property
    def routing(self) -> Routing:
        assert self.plan.routing is not None
        return self.plan.routing

    def top_k(self, x: Tensor, rows: TokenBatch, kv: NoCache, options: TopKOptions, trace: RoutingTrace | None) -> Tensor:
        """Training by expert-choice. Recursion r asks only the tokens that recursion r-1 kept.

        Capacities are of a row's real tokens. Where those differ from its length, shapes are the length's, and the surplus
        runs along unseen: nobody attends to it, and what comes of it is discarded.
        """
        T = x.shape[1]
        quotas = Quotas.of(self.routing, rows, options)
        routers, slots, keep = self.routers, rows.slots, rows.keep
        depths = torch.zeros_like(slots)
        left: list[tuple[Entered, Picked]] = []
        for recursion in range(self.plan.recursions):
            seen = routers.seen(recursion, x)
            kept = self.routing.kept(recursion, T, options.openness)
            picked = None
            if quotas is not None and self.routing.capacity[recursion] < 1:
                within = quotas.at(recursion, slots)
                picked = routers.pick(self._rank(recursion, seen, rows, slots), keep, kept, *within)
            elif kept < x.shape[1]:
                picked = routers.pick(self._rank(recursion, seen, rows, slots), keep, kept)
            entered = routers.enter(recursion, x, seen, picked)
            logits, asked, asked_slots = entered.logits, keep, slots
            judged = logits if trace is None else routers.judge(recursion, x, logits)
            if picked is not None:
                slots, logits = slots.gather(1, picked.at_BN), logits.gather(1, picked.at_BN)
                keep = picked.valid_BN  # who is picked from a padded row is picked by quota
                left.append((entered, picked))
            if trace is not None:
                asked = torch.ones_like(seen, dtype=torch.bool) if asked is None else asked
                chosen = asked if picked is None else asked & _chosen(picked)
                selective = self.routing.capacity[recursion] < 1
                trace.decisions.append(Decision(entered.logits, judged, chosen, asked_slots, asked, selective))
                depths = depths.scatter_add(1, slots, torch.ones_like(slots) if keep is None else keep.long())
            valid = None if picked is None else picked.valid_BN
            out = self._block(recursion, entered.taken, slots, keep, rows, kv.focus(at_BK=slots, valid_BK=valid), bool(left))
            x = routers.advance(entered.stays, out, logits)
            if valid is not None:
                x = torch.where(valid[..., None], x, entered.stays)
        for entered, picked in reversed(left):
            x = routers.rejoin(entered, picked, x)
        if trace is not None:
            trace.depths_BT, trace.keep_BT = depths, rows.keep
        return x

    def by_depth(self, x: Tensor, rows: TokenBatch, kv: NoCache, trace: RoutingTrace | None) -> Tensor:
        """Training by token-choice. Tokens that go on stand first in their row, in order, and surplus behind them, where
        causal attention does not look: nobody needs a mask, unless documents or windows ask for one. A recursion that
        nobody chose runs surplus, so that all ranks make the same calls."""
        choice = self._choice(x, rows, DepthControl(), trace)
        assert isinstance(choice, _TokenChoice)
        T, first, own = x.shape[1], x, self.plan.kv == "cache"
        masked = rows.documents_BT is not None or any(self.architecture.window(step.origin) for step in self.plan)
        _, scores = choice.decide(0, x)
        out = self._block(0, x, rows.slots, rows.keep, rows, kv.focus(at_BK=rows.slots), selected=False)  # everyone's
        x = choice.updated(0, x, out, scores, first)
        for recursion, count in enumerate(choice.longest()[1:], start=1):
            go, scores = choice.decide(recursion, x)
            at = (~go).to(torch.int8).argsort(dim=1, stable=True)[:, : _rounded_up(count, T)]
            slots, valid = rows.slots.gather(1, at), go.gather(1, at)
            old = take(x, at)
            seen = valid if masked or not own else None
            out = self._block(recursion, old, slots, seen, rows, kv.focus(at_BK=slots, valid_BK=valid), selected=True)
            new = choice.updated(recursion, old, out, take(scores, at), take(first, at), at)
            x = put(x, at, torch.where(valid[..., None], new, old))
        choice.note()
        return x

    def whole(self, x: Tensor, rows: TokenBatch, kv: NoCache, control: DepthControl, trace: RoutingTrace | None) -> Tensor:
        """Causal routing over whole rows."""
        choice = self._choice(x, rows, control, trace)
        slots, first = rows.slots, x
        for recursion in range(control.recursions(self.plan.recursions)):
            go, logits = choice.decide(recursion, x)
            own = self.plan.kv == "cache"
            shown = go if own else rows.keep
            steps = self.plan.recursion_steps(recursion)
            masks = gathered_masks(self.architecture, steps, rows, x.dtype, slots, shown_BK=shown)
            out = self.run(x, steps, masks, kv.focus(active_BT=go))
            x = torch.where(go[..., None], choice.updated(recursion, x, out, logits, first), x)
        choice.note()
        return x

    def cached(
        self, x: Tensor, rows: TokenBatch, cache: RoutedCache, control: DepthControl, trace: RoutingTrace | None
    ) -> Tensor:
        """Causal routing behind what a cache holds; entries are stored for the tokens that go on, and for no other."""
        choice = self._choice(x, rows, control, trace)
        first = x
        for recursion in range(control.recursions(self.plan.recursions)):
            go, logits = choice.decide(recursion, x)
            longest = int(go.sum(1).max())
            if not longest:
                break
            at = torch.argsort((~go).long(), dim=1, stable=True)[:, :longest]
            valid = go.gather(1, at)
            slots = rows.slots.gather(1, at)
            cache.place(recursion, slots, valid)
            steps = self.plan.recursion_steps(recursion)
            masks = gathered_masks(self.architecture, steps, rows, x.dtype, slots, keys_BK=cache.key_slots(recursion))
            old = take(x, at)
            out = self.run(old, steps, masks, cache)
            picked = logits.gather(1, at) if logits.dim() == 2 else take(logits, at)
            new = choice.updated(recursion, old, out, picked, take(first, at), at)
            x = put(x, at, torch.where(valid[..., None], new, old))
        choice.note()
        return x

    def _choice(self, x: Tensor, rows: TokenBatch, control: DepthControl, trace: RoutingTrace | None) -> _Choice:
        control.check(self.plan.recursions)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if rows.keep is None else rows.keep
        kind = _ExpertChoice if self.routing.kind == "expert" else _TokenChoice
        return kind(self, x, rows, keep, control, trace)

    def _rank(self, recursion: int, seen_BN: Tensor, rows: TokenBatch, slots_BN: Tensor) -> Tensor:
        if not self.routing.random:
            return seen_BN
        return draw(_keys(rows).gather(1, slots_BN), recursion).to(seen_BN.dtype)

    def _block(
        self, recursion: int, x: Tensor, slots: Tensor, keep: Tensor | None, rows: TokenBatch, kv: NoCache, selected: bool
    ) -> Tensor:
        """One recursion over gathered tokens: among themselves, or over the first recursion's entries for all. `selected`:
        some token was turned away before."""
        steps = self.plan.recursion_steps(recursion)
        keys, shown = None, keep
        if self.plan.kv != "cache" and selected:
            keys, shown = rows.slots, rows.keep
        masks = self.see(self.architecture, steps, rows, x.dtype, slots, keys_BK=keys, shown_BK=shown)
        return self.run(x, steps, masks, kv)


def _rounded_up(count: int, tokens: int) -> int:
    """A count of tokens as one of a few sizes, since each is compiled for itself."""
    size = -(-tokens // SIZES)
    return min(tokens, max(1, -(-count // size)) * size)


def _keys(rows: TokenBatch) -> Tensor:
    """What random routing draws by."""
    if rows.tokens_BT is None:
        raise OptionError("random routing draws by token ids; it cannot run on input embeddings")
    return draw_key(rows.tokens_BT, rows.positions_BT)


def _chosen(picked: Picked) -> Tensor:
    """(B, T): the tokens that really go on."""
    taken_BT = picked.place_BT >= 0
    return taken_BT if picked.valid_BN is None else torch.zeros_like(taken_BT).scatter(1, picked.at_BN, picked.valid_BN)


class _Choice(Protocol):
    """Causal decisions of one pass: what both kinds of routing answer."""

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, logits: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor: ...

    def note(self) -> None: ...


class _ExpertChoice:
    def __init__(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> None:
        self._walk, self._rows, self._control, self._trace = walk, rows, control, trace
        self._active = keep
        self._depths = torch.zeros_like(keep, dtype=torch.long)

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Who goes on: a token that went through the recursion before and whose score passes the threshold."""
        walk, asked = self._walk, self._active
        logits = walk.routers.logits(recursion, x)
        judged = walk.routers.judge(recursion, x, logits)
        capacity = walk.routing.capacity
        selective = capacity[recursion] < 1  # the first recursion usually takes everyone, in training as here
        if self._control.depths_BT is not None:
            go = asked & (self._control.depths_BT > recursion)
        elif not selective:
            go = asked
        elif walk.routing.random:
            share = capacity[recursion] / (capacity[recursion - 1] if recursion else 1.0)
            go = asked & (draw(_keys(self._rows), recursion) >= 1 - share)
        else:
            go = asked & (judged + self._control.bias >= 0)
        if self._trace is not None:
            self._trace.decisions.append(Decision(logits, judged, go, self._rows.slots, asked, selective))
        self._active = go
        self._depths = self._depths + go.long()
        return go, logits

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, logits: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor:
        return self._walk.routers.advance(x, out, logits)

    def note(self) -> None:
        if self._trace is not None:
            self._trace.depths_BT, self._trace.keep_BT = self._depths, self._rows.keep


class _TokenChoice:
    """Decided once, on the stream that enters the first recursion."""

    def __init__(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> None:
        self._walk, self._rows, self._trace, self._keep = walk, rows, trace, keep
        routers, routing = walk.routers, walk.routing
        self._logits = routers.depth_logits(x)
        self._scores = routers.score(self._logits)
        ranked = self._scores.detach() if routers.bias is None else self._scores.detach() + routers.bias
        if control.bias:
            ranked = (ranked.clamp_min(1e-30).log() if routing.score == "softmax" else ranked) + control.bias * torch.arange(
                routing.recursions, device=x.device
            )
        last = drawn_depth(_keys(rows), routing.recursions) if routing.random else ranked.argmax(-1)
        last = last if control.depths_BT is None else control.depths_BT - 1
        self._last = last.clamp_max(control.recursions(routing.recursions) - 1)

    def longest(self) -> list[int]:
        """The most tokens of a row that run each recursion."""
        ran_RBT = [self._keep & (self._last >= recursion) for recursion in range(self._walk.routing.recursions)]
        found: list[int] = torch.stack([ran_BT.sum(1).amax() for ran_BT in ran_RBT]).tolist()
        return found

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._keep & (self._last >= recursion), self._scores

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, logits: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor:
        """The thesis' equation for token-choice: the last recursion adds the stream that entered the first."""
        routing = self._walk.routing
        weight = (routing.alpha * logits[..., recursion])[..., None].to(x.dtype)
        last = (self._last if at is None else self._last.gather(1, at)) == recursion
        if routing.weighting == "every":
            return weight * out + torch.where(last[..., None], first, 0.0)
        return torch.where(last[..., None], first + weight * out, out)

    def note(self) -> None:
        if self._trace is None:
            return
        self._trace.depth_logits_BTR, self._trace.depth_scores_BTR = self._logits, self._scores
        self._trace.depths_BT, self._trace.keep_BT = (self._last + 1) * self._keep, self._rows.keep
