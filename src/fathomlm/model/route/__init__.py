"""Routers and the routed core: recursions of one block, each over the tokens that go on (thesis 4.3; its appendix on router
design). `depth.routing` names the kinds of routers.

Scores are computed in float32 whatever the stream's dtype: half the tokens of a trained router sit near two values, and
bfloat16 would tie them. Inputs are the un-normalised residual stream.

Three walks that agree where they overlap:

    training   the kind's own (`Routers.train_walk`): the tokens that go on are gathered, so that the compute saved is really
               saved
    whole      causal and slow: every token runs every recursion, and a mask discards what it should not have run. The
               meaning of routed inference
    cached     causal and with a cache: the tokens that go on are gathered, and only they leave entries

Shapes: B batch, T tokens of a sequence, N tokens that run a recursion, M hidden width, R recursions.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import Cache, NoCache, RoutedCache
from fathomlm.depth import Architecture, DepthPlan, Routing, Step
from fathomlm.depth.routing.kind import inner_width
from fathomlm.errors import OptionError
from fathomlm.kernels.rows import put, take
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.route.trace import DepthControl, RoutingTrace, TopKOptions


class Router(nn.Module):
    """One router: a linear map, or two with a GELU between."""

    def __init__(self, hidden: int, outputs: int, network: str) -> None:
        super().__init__()
        inner = inner_width(network, hidden)
        self.inner = None if inner is None else nn.Linear(hidden, inner, bias=False)
        self.out = nn.Linear(hidden if inner is None else inner, outputs, bias=False)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """Logits (B, N, outputs)."""
        with torch.autocast(x_BNM.device.type, enabled=False):
            x = x_BNM.to(torch.promote_types(x_BNM.dtype, torch.float32))
            if self.inner is not None:
                x = F.gelu(_applied(self.inner, x))
            return _applied(self.out, x)


def _applied(linear: nn.Module, x: Tensor) -> Tensor:
    """A linear in the dtype of x; one that another package has wrapped (PEFT) with all that it adds."""
    if isinstance(linear, nn.Linear):
        return F.linear(x, linear.weight.to(x.dtype))
    out: Tensor = linear(x.to(next(linear.parameters()).dtype))
    return out.to(x.dtype)


class Choice(Protocol):
    """Causal decisions of one pass."""

    def decide(self, recursion: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens run a recursion (B, T), and the router scores: (B, T), or (B, T, R) where depths are scored."""
        ...

    def updated(
        self, recursion: int, x: Tensor, out: Tensor, scores: Tensor, first: Tensor, at: Tensor | None = None
    ) -> Tensor:
        """The stream after a recursion that made `out` of `x`; `first` is the stream in front of the core, and `at` says
        which tokens these are, where not all."""
        ...

    def note(self) -> None:
        """Write what was decided into the trace."""
        ...


class Routers(nn.Module):
    """All routers of a model: `main` weighs and, in training, selects; `aux` decides at inference where there is one. Each
    kind of router is a subclass."""

    def __init__(self, hidden: int, routing: Routing, count: int, outputs: int) -> None:
        """`count` routers, each with so many outputs."""
        super().__init__()
        self.routing = routing
        self.main = nn.ModuleList(Router(hidden, outputs, routing.network) for _ in range(count))
        self.aux = nn.ModuleList()
        self.bias: nn.Parameter | None = None
        """Loss-free balancing: added to the scores for the selection only; moved by `balance`, and by no gradient."""

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile what routers do to the stream between two passes of the block."""

    def open_all(self) -> None:
        """Conversion: set fresh routers such that the model computes what it did without them, where there is such a
        setting."""

    def score(self, logits: Tensor) -> Tensor:
        """Logits as scores: one number each, or with softmax a whole row of depths."""
        if self.routing.score == "softmax":
            return logits.softmax(-1)
        if self.routing.score == "identity":
            return logits
        return logits.sigmoid() if self.routing.score == "sigmoid" else logits.tanh()

    def choose(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, keep: Tensor, control: DepthControl, trace: RoutingTrace | None
    ) -> Choice:
        """The causal decisions of a forward pass over the stream x, in front of the core."""
        raise NotImplementedError

    def train_walk(
        self, walk: RoutedWalk, x: Tensor, rows: TokenBatch, kv: NoCache, options: TopKOptions, trace: RoutingTrace | None
    ) -> Tensor:
        """The core in training."""
        raise NotImplementedError

    @classmethod
    def loss_names(cls, routing: Routing) -> tuple[str, ...]:
        """What `losses` returns."""
        raise NotImplementedError

    @classmethod
    def losses(cls, trace: RoutingTrace, routing: Routing, keep_BT: Tensor, counted_B: Tensor) -> dict[str, Tensor]:
        """What teaches routers (`router`, `router_z`), unweighted, and figures to watch. Each is a mean over a row's tokens,
        times `counted_B`, the row's tokens that have a target, summed over rows."""
        raise NotImplementedError

    @torch.no_grad()
    def balance(self, loads_R: Tensor, rate: float | Tensor) -> None:
        """Loss-free balancing: depths that are chosen too seldom become a little more attractive."""
        if self.bias is not None:
            self.bias.add_(rate * (loads_R.mean() - loads_R).sign().to(self.bias.dtype))


def routers_of(routing: Routing) -> type[Routers]:
    """The class of a kind of router."""
    kind: type[Routers] = pkgutil.resolve_name(routing.method.module)
    return kind


def build_routers(hidden: int, routing: Routing | None) -> Routers | None:
    return None if routing is None else routers_of(routing)(hidden, routing)  # type: ignore[call-arg]


class RunSteps(Protocol):
    """Runs some steps of the plan over a stream."""

    def __call__(self, x: Tensor, steps: Sequence[Step], masks: AttentionMasks, kv: Cache | NoCache) -> Tensor: ...


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

    def whole(self, x: Tensor, rows: TokenBatch, kv: NoCache, control: DepthControl, trace: RoutingTrace | None) -> Tensor:
        """Causal routing over whole rows."""
        choice = self.choice(x, rows, control, trace)
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
        choice = self.choice(x, rows, control, trace)
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

    def choice(self, x: Tensor, rows: TokenBatch, control: DepthControl, trace: RoutingTrace | None) -> Choice:
        control.check(self.plan.recursions)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if rows.keep is None else rows.keep
        return self.routers.choose(self, x, rows, keep, control, trace)

    def block(
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


def draw_keys(rows: TokenBatch) -> Tensor:
    """What random routing draws by."""
    if rows.tokens_BT is None:
        raise OptionError("random routing draws by token ids; it cannot run on input embeddings")
    return draw_key(rows.tokens_BT, rows.positions_BT)


KEY_STRIDE = 1_000_003


def draw_key(tokens_BN: Tensor, positions_BN: Tensor) -> Tensor:
    """What random routing draws by: a token and its position. The position alone would give every sequence the same depths
    (and two thirds of all positions never a last recursion); a generator's state would not be the same in training, prefill
    and decoding."""
    return (positions_BN.long() + KEY_STRIDE * tokens_BN.long()) % 4294967296


def draw(numbers_BN: Tensor, recursion: int) -> Tensor:
    """Random routing: a number in [0, 1) for each key, the same in training, prefill and decoding, in any batch."""
    mixed = (numbers_BN.long() * 2654435761 + (recursion + 1) * 40503 + 12345) % 4294967296
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 4294967296
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 % 4294967296
    return ((mixed ^ (mixed >> 16)) % 4294967296).double() / 4294967296


__all__ = [
    "DepthControl", "RoutedWalk", "Router", "Routers", "RoutingTrace", "RunSteps", "TopKOptions", "build_routers", "draw",
    "draw_key", "draw_keys", "routers_of",
]  # fmt: skip
