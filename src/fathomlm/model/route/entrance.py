"""How tokens enter a recursion in training and come back: selection and the stream's fork, with backward passes that touch
the stream as seldom as they can.

Left to autograd, a recursion that takes some tokens of a stream would give its gradient back in six passes over memory:
zeros with the taken tokens' gradients written in, the others' with zeros at the taken, their sum, and the router's added.
Here all of it is one formula, token by token:

    d_x = d_logit w + (a token that was taken: its gradient behind `enter`; any other: what `rejoin` got for it)

so compiled it is one pass. Since `enter` looks at nobody's gradient in the wrong place, `rejoin` need not clear any.

Shapes: B rows, T tokens that are asked, N tokens that are taken, M hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathomlm.depth import Routing
from fathomlm.kernels.rows import placed, taken
from fathomlm.model.attention_mask import TokenBatch
from fathomlm.model.route.trace import TopKOptions


class PickedTokens(NamedTuple):
    """The tokens that a recursion takes of each row, in their order."""

    at_BN: Tensor
    flat: Tensor
    """The same among the tokens of all rows, (B x N)."""
    place_BT: Tensor
    """Each token's place among those taken of its row, -1 for the others."""
    valid_BN: Tensor | None = None
    """False at surplus: tokens that were only taken to fill the shape, and whose outcome is discarded. None: no surplus."""


def pick(rank_BT: Tensor, keep_BT: Tensor | None, count: int) -> PickedTokens:
    """The `count` highest of each row; padding, where `keep_BT` is False, comes last."""
    T = rank_BT.shape[1]
    if keep_BT is not None:
        rank_BT = rank_BT.masked_fill(~keep_BT, -torch.inf)
    return _picked(rank_BT.topk(count, sorted=False).indices.sort(dim=-1).values, T)


def pick_within(
    rank_BT: Tensor, keep_BT: Tensor | None, groups_BT: Tensor | None, quota_BT: Tensor, count: int
) -> PickedTokens:
    """The highest of each group of a row, as many as its quota says, filled up with surplus to `count` tokens.

    Groups are packed documents, or the whole row. Quotas depend on the data (padding, document lengths, a capacity that
    changes with every step) while shapes must not; so `count` is an upper bound and `valid_BN` says who really goes on.
    Every token carries its group's quota. Padding, where `keep_BT` is False, is never valid.
    """
    B, T = rank_BT.shape
    if keep_BT is not None:
        rank_BT = rank_BT.masked_fill(~keep_BT, -torch.inf)
    order_BT = rank_BT.argsort(dim=1, descending=True, stable=True)
    within_BT = torch.arange(T, device=rank_BT.device).expand(B, T)
    if groups_BT is not None:
        order_BT = order_BT.gather(1, groups_BT.gather(1, order_BT).argsort(dim=1, stable=True))
        sorted_BT = groups_BT.gather(1, order_BT)
        within_BT = within_BT - torch.searchsorted(sorted_BT, sorted_BT)
    goes_BT = torch.zeros_like(order_BT).scatter(1, order_BT, within_BT) < quota_BT
    if keep_BT is not None:
        goes_BT = goes_BT & keep_BT
    at_BN = (~goes_BT).to(torch.int8).argsort(dim=1, stable=True)[:, :count].sort(dim=1).values
    return _picked(at_BN, T, goes_BT.gather(1, at_BN))


def _picked(at_BN: Tensor, T: int, valid_BN: Tensor | None = None) -> PickedTokens:
    B, N = at_BN.shape
    rows_B1 = torch.arange(B, device=at_BN.device)[:, None]
    places_BN = torch.arange(N, device=at_BN.device).expand(B, N)
    place_BT = torch.full((B, T), -1, dtype=torch.long, device=at_BN.device).scatter(1, at_BN, places_BN)
    return PickedTokens(at_BN, (at_BN + rows_B1 * T).flatten(), place_BT, valid_BN)


def router_logits(x_BTM: Tensor, weight_M: Tensor) -> Tensor:
    """The logits of a linear router for each token, at least in float32."""
    with torch.autocast(x_BTM.device.type, enabled=False):
        wide = _wide(x_BTM, weight_M)
        return (x_BTM.to(wide) * weight_M.to(wide)).sum(-1)


def enter_all(x_BTM: Tensor, weight_M: Tensor, seen_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two copies of the stream, and logits. `seen_BT` is what `router_logits` gave; with gradients those are the logits."""
    first, second, logits = _EnterAll.apply(x_BTM, weight_M, seen_BT)  # type: ignore[no-untyped-call]
    return first, second, logits


def enter_some(x_BTM: Tensor, weight_M: Tensor, seen_BT: Tensor, picked: PickedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """The stream for `rejoin` and for nobody else, the tokens that are taken (B, N, M), and logits of all."""
    before, going, logits = _EnterSome.apply(x_BTM, weight_M, seen_BT, picked.flat, picked.place_BT)  # type: ignore[no-untyped-call]
    return before, going, logits


def rejoin(before_BTM: Tensor, flat: Tensor, new_BNM: Tensor) -> Tensor:
    """The stream with the tokens that `enter_some` took replaced."""
    out: Tensor = _Rejoin.apply(before_BTM, flat, new_BNM)  # type: ignore[no-untyped-call]
    return out


class _EnterAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTM: Tensor, weight_M: Tensor, seen_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x_BTM, weight_M)
        return x_BTM.view_as(x_BTM), x_BTM.view_as(x_BTM), seen_BT.clone()

    @staticmethod
    def backward(ctx: Any, d_first: Tensor, d_second: Tensor, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        x_BTM, weight_M = ctx.saved_tensors
        wide = d_logits.dtype
        d_x = d_first.to(wide) + d_second.to(wide) + d_logits[..., None] * weight_M.to(wide)
        return d_x.to(x_BTM.dtype), _weight_gradient(x_BTM, weight_M, d_logits), None


class _EnterSome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTM: Tensor, weight_M: Tensor, seen_BT: Tensor, flat: Tensor, place_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x_BTM, weight_M, place_BT)
        return x_BTM.view_as(x_BTM), taken(x_BTM, flat), seen_BT.clone()

    @staticmethod
    def backward(ctx: Any, d_before: Tensor, d_taken_BNM: Tensor, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        x_BTM, weight_M, place_BT = ctx.saved_tensors
        B, N, M = d_taken_BNM.shape
        wide = d_logits.dtype
        rows_B1 = torch.arange(B, device=place_BT.device)[:, None]
        from_taken = d_taken_BNM.reshape(B * N, M)[place_BT.clamp_min(0) + rows_B1 * N]
        d_stream = torch.where((place_BT >= 0)[..., None], from_taken, d_before)
        d_x = d_stream.to(wide) + d_logits[..., None] * weight_M.to(wide)
        return d_x.to(x_BTM.dtype), _weight_gradient(x_BTM, weight_M, d_logits), None, None, None


class _Rejoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before_BTM: Tensor, flat: Tensor, new_BNM: Tensor) -> Tensor:
        ctx.save_for_backward(flat)
        return placed(before_BTM, flat, new_BNM)

    @staticmethod
    def backward(ctx: Any, d_BTM: Tensor) -> tuple[Tensor, None, Tensor]:
        (flat,) = ctx.saved_tensors
        return d_BTM, None, taken(d_BTM, flat)


def _weight_gradient(x_BTM: Tensor, weight_M: Tensor, d_logits: Tensor) -> Tensor:
    return (d_logits[..., None] * x_BTM.to(d_logits.dtype)).sum((0, 1)).to(weight_M.dtype)


def _wide(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


@dataclass(frozen=True, slots=True)
class Quotas:
    """How many tokens of a row a recursion keeps in training where that is not simply a part of the row's length.

    Three reasons: padding, which has no claim to capacity; packed documents that are to have a capacity each; and a warm-up
    that changes with every step. Each makes the number depend on the data or the step, while compiled shapes may not, so a
    recursion takes as many tokens as the row's length would give, and the quota of a token's group (its document or its
    row) says which of them count.
    """

    routing: Routing
    sizes_BT: Tensor
    """Real tokens of the group that a token is in."""
    groups_BT: Tensor | None
    """Documents that compete among themselves; None where rows do."""
    openness: float | Tensor

    @classmethod
    def of(cls, routing: Routing, rows: TokenBatch, options: TopKOptions) -> Quotas | None:
        """None where every row keeps the part of its length that shapes say."""
        documents_BT = rows.documents_BT if options.per_document else None
        if rows.keep is None and documents_BT is None and options.exact is None:
            return None
        real_BT = torch.ones_like(rows.slots) if rows.keep is None else rows.keep.long()
        openness = options.openness if options.exact is None else options.exact
        if documents_BT is None:
            return cls(routing, real_BT.sum(1, keepdim=True).expand_as(real_BT), None, openness)
        groups_BT = documents_BT.long()
        at_BT = groups_BT.clamp_min(0)
        sizes_BT = torch.zeros_like(real_BT).scatter_add(1, at_BT, real_BT * (groups_BT >= 0)).gather(1, at_BT)
        return cls(routing, sizes_BT, groups_BT, openness)

    def at(self, recursion: int, slots_BN: Tensor) -> tuple[Tensor | None, Tensor]:
        """Groups and quotas of the tokens at these slots. A row keeps a token at least, as `Routing.kept` has it; a
        document shorter than 1/capacity keeps none, or many short ones would outgrow the row's share."""
        part = self.routing.part(recursion, self.openness)
        sizes_BN = self.sizes_BT.gather(1, slots_BN)
        quota_BN = (part * sizes_BN.double() + 1e-9).floor().long()
        if self.groups_BT is None:
            return None, torch.minimum(quota_BN.clamp_min(1), sizes_BN)
        return self.groups_BT.gather(1, slots_BN), torch.minimum(quota_BN, sizes_BN)
