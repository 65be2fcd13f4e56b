"""Taking some tokens of each row and putting them back, with gradients that copy instead of adding.

The tokens taken are different ones, which `torch.gather` cannot know: its backward pass adds with atomics.

Shapes: B rows, T tokens, N taken tokens, M width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take(x_BTM: Tensor, at_BN: Tensor) -> Tensor:
    """The tokens at `at_BN`, (B, N, M); no token twice."""
    out: Tensor = _Take.apply(x_BTM, at_BN)  # type: ignore[no-untyped-call]
    return out


def put(x_BTM: Tensor, at_BN: Tensor, new_BNM: Tensor) -> Tensor:
    """x with the tokens at `at_BN` replaced."""
    out: Tensor = _Put.apply(x_BTM, at_BN, new_BNM)  # type: ignore[no-untyped-call]
    return out


def _flat(at_BN: Tensor, T: int) -> Tensor:
    first = torch.arange(at_BN.shape[0], device=at_BN.device)[:, None] * T
    return (at_BN + first).flatten()


def taken(x_BTM: Tensor, flat: Tensor) -> Tensor:
    """`take` without gradients; `flat` are places among the tokens of all rows, as many of each row."""
    B, T, M = x_BTM.shape
    return x_BTM.reshape(B * T, M).index_select(0, flat).view(B, -1, M)


def placed(x_BTM: Tensor, flat: Tensor, new_BNM: Tensor) -> Tensor:
    """`put` without gradients."""
    B, T, M = x_BTM.shape
    return x_BTM.reshape(B * T, M).index_copy(0, flat, new_BNM.reshape(-1, M)).view(B, T, M)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTM: Tensor, at_BN: Tensor) -> Tensor:
        flat = _flat(at_BN, x_BTM.shape[1])
        ctx.save_for_backward(flat)
        ctx.tokens = x_BTM.shape[1]
        return taken(x_BTM, flat)

    @staticmethod
    def backward(ctx: Any, d_BNM: Tensor) -> tuple[Tensor, None]:
        (flat,) = ctx.saved_tensors
        B, _, M = d_BNM.shape
        d_x = d_BNM.new_zeros(B * ctx.tokens, M).index_copy_(0, flat, d_BNM.reshape(-1, M))
        return d_x.view(B, ctx.tokens, M), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTM: Tensor, at_BN: Tensor, new_BNM: Tensor) -> Tensor:
        flat = _flat(at_BN, x_BTM.shape[1])
        ctx.save_for_backward(flat)
        return placed(x_BTM, flat, new_BNM)

    @staticmethod
    def backward(ctx: Any, d_BTM: Tensor) -> tuple[Tensor, None, Tensor]:
        (flat,) = ctx.saved_tensors
        B, T, M = d_BTM.shape
        return d_BTM.reshape(B * T, M).index_fill(0, flat, 0.0).view(B, T, M), None, taken(d_BTM, flat)
