"""What teaches routers (thesis 4, appendix "Design Choices for Routing Strategy").

Each is a mean over a row's tokens, times the tokens of that row that have a target, summed over rows: divided by the
targets of a whole step it is a mean again, so that micro-batches and ranks do not change it.

Shapes: B rows, T tokens, N tokens that were asked, R recursions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.depth import Routing
from fathomlm.model.route.metrics import agreement
from fathomlm.model.route.trace import RoutingTrace


def routing_names(routing: Routing) -> tuple[str, ...]:
    """What the parts of `routing_parts` are called."""
    if routing.kind == "expert":
        return ("router", "router_z", "mean_depth", "sampling_accuracy")
    return ("router", "router_z", "mean_depth", *(f"load_{i + 1}" for i in range(routing.recursions)))


def routing_parts(trace: RoutingTrace, routing: Routing, counted_B: Tensor) -> dict[str, Tensor]:
    """The losses (`router`, `router_z`), unweighted, and figures to watch."""
    assert trace.depths_BT is not None
    keep = torch.ones_like(trace.depths_BT, dtype=torch.bool) if trace.keep_BT is None else trace.keep_BT
    tokens = keep.sum(1).clamp_min(1)
    parts = {"mean_depth": (counted_B * (trace.depths_BT * keep).sum(1) / tokens).sum()}
    if routing.kind == "expert":
        return parts | _expert(trace, counted_B) | {"sampling_accuracy": agreement(trace, counted_B)}
    return parts | _token(trace, routing, keep, counted_B)


def _expert(trace: RoutingTrace, counted_B: Tensor) -> dict[str, Tensor]:
    """Binary cross entropy of what decides at inference against what the top k were, summed over recursions."""
    losses, squares = counted_B.new_zeros(()), counted_B.new_zeros(())
    for decision in trace.decisions:
        asked = decision.asked_BN.to(decision.judge_BN.dtype)
        each = F.binary_cross_entropy_with_logits(decision.judge_BN, decision.chosen_BN.to(asked.dtype), reduction="none")
        many = asked.sum(1).clamp_min(1)
        losses = losses + (counted_B * (each * asked).sum(1) / many).sum()
        squares = squares + (counted_B * (decision.logits_BN.square() * asked).sum(1) / many).sum()
    return {"router": losses, "router_z": squares}


def _token(trace: RoutingTrace, routing: Routing, keep_BT: Tensor, counted_B: Tensor) -> dict[str, Tensor]:
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
