"""Losses at early exits: how much each counts, and what a gate and classifiers learn there.

Weights are the thesis' (2, equation of the weighted cross entropy; 3, early-exit training) or LayerSkip's (Elhoushi et al.
2024), where layers are dropped in training too, ever likelier with depth, and every layer learns to be the last. What is
dropped follows from the step's number and a row's own tokens, so neither how a batch is split nor where a run was stopped
changes anything.

A gate's loss is what a token is expected to cost over the exits where the gate may let it go, less a part of how undecided
the gate is about them (Ouro; Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models"):

    p(i) = g(i) * prod_{j < i} (1 - g(j))          the last output takes what is left
    loss = sum_i p(i) CE(i) - entropy * H(p)

The cross entropies teach the gate, and the gate's probabilities weigh what each loop learns. The entropy keeps it from
settling on one loop before the loops differ. A classifier learns whether its exit chooses what the last output chooses
(CALM, section 3.3).

Shapes: B rows, T tokens, S steps, N = B x T, E early exits, O = E + 1 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.kernels.splitmix import GOLDEN, mix
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.recipe import ExitRecipe


def exit_steps(recipe: ExitRecipe, plan: DepthPlan) -> tuple[int, ...]:
    """The indices of the steps that the early exits follow; a draft layer follows none of them."""
    if recipe.draft:
        return ()
    if recipe.at == "all":
        if plan.unrolled_layers < 2:
            raise OptionError("loss.exits.at: all requires a model with at least 2 layers, got 1: the last one is no exit")
        return plan.with_exits(range(plan.unrolled_layers - 1)).exits
    if recipe.at == "recursions":
        ends = plan.recursion_ends()
        if not ends:
            raise OptionError(
                "loss.exits.at: recursions requires a model with recursions >= 2; give steps instead, such as [6], or all"
            )
        return ends
    if not recipe.at:
        raise OptionError("loss.exits.at must name at least one step")
    return plan.with_exits(count - 1 for count in recipe.at).exits


def exited_plan(recipe: ExitRecipe, plan: DepthPlan) -> DepthPlan:
    """The plan with what a recipe trains."""
    gate = recipe.weights == "gate"
    return plan.with_exits(exit_steps(recipe, plan), layer=recipe.layer, gate=gate, draft=bool(recipe.draft))


def early_outputs(recipe: ExitRecipe | None, plan: DepthPlan) -> int:
    """How many outputs learn beside the last, at most, in a step."""
    if recipe is not None and recipe.draft:
        return recipe.draft
    return len(plan.exits) if recipe is None or not recipe.rotate else -(-len(plan.exits) // recipe.rotate)


def exit_weights(recipe: ExitRecipe, depths: Sequence[int]) -> tuple[float, ...]:
    """The weight of each output, shallow to deep, the last output included.

    `depths` are the outputs' depths: recursions (1, 2, ..., R) or steps, whichever the exits are named by. Weighted,
    unweighted and layerskip add up to 1; aggressive leaves the last output at 1, so that it trains as without exits.
    """
    if recipe.weights == "weighted":
        return tuple(depth / sum(depths) for depth in depths)
    if recipe.weights == "gate":  # says it token by token
        return (1.0,) * len(depths)
    if recipe.weights == "layerskip":
        return summed_depth_weights(depths, recipe.coefficient)
    if recipe.weights == "unweighted":
        return tuple(1 / len(depths) for _ in depths)
    return (*(recipe.coefficient for _ in depths[:-1]), 1.0)


def exit_depths(recipe: ExitRecipe, plan: DepthPlan) -> tuple[int, ...]:
    """The depth of each output, the last included, in the unit that the exits are named by."""
    steps = exit_steps(recipe, plan)
    if recipe.at == "recursions":
        return tuple(range(1, len(steps) + 2))
    return (*(index + 1 for index in steps), plan.unrolled_layers)


def summed_depth_weights(depths: Sequence[int], scale: float) -> tuple[float, ...]:
    """Section 4.2: an early output's weight is `scale` times the sum of all depths below it, from 0; the last one's is that
    and its depth more. They add up to 1."""
    *early, last = depths
    found = [scale * (depth - 1) * depth / 2 for depth in early]
    found.append(last - 1 + scale * (last - 2) * (last - 1) / 2)
    return tuple(weight / sum(found) for weight in found)


def drop_chances(layers: int, most: float) -> list[float]:
    """How likely a row skips each step: never the first, the last with `most`, doubling ones in between (section 4.1)."""
    return [most * (2 ** (step / max(layers - 1, 1)) - 1) for step in range(layers)]


def kept_steps(tokens_BT: Tensor, number: int, layers: int, most: float) -> Tensor:
    """Which rows run each step in optimizer step `number`, (S, B). Not scaled, as there: inference runs every layer."""
    device = tokens_BT.device
    places_T = mix(torch.arange(1, tokens_BT.shape[1] + 1, device=device) * GOLDEN)
    row_B = mix(((tokens_BT + 1) * places_T).sum(1) + ((number * GOLDEN + 2**63) % 2**64 - 2**63))
    steps_S = torch.arange(1, layers + 1, device=device)
    drawn_SB = mix(row_B + steps_S[:, None] * GOLDEN)
    uniform_SB = (drawn_SB & (2**53 - 1)).double() / 2**53
    return uniform_SB >= torch.tensor(drop_chances(layers, most), dtype=torch.float64, device=device)[:, None]


def exit_log_probabilities(scores_NE: Tensor) -> Tensor:
    """log p over the outputs, (N, O), from the gate's scores at the early exits, before the sigmoid."""
    stays_NE = F.logsigmoid(-scores_NE).cumsum(-1)
    reached_NE = F.pad(stays_NE[:, :-1], (1, 0))
    return torch.cat((F.logsigmoid(scores_NE) + reached_NE, stays_NE[:, -1:]), dim=-1)


def exit_entropy(log_p_NO: Tensor) -> Tensor:
    """H(p) of each token."""
    return -(log_p_NO.exp() * log_p_NO).sum(-1)


def expected_exit(log_p_NO: Tensor) -> Tensor:
    """The output that each token is expected to exit at, from 1."""
    return (log_p_NO.exp() * torch.arange(1, log_p_NO.shape[1] + 1, device=log_p_NO.device)).sum(-1)


def agreement_loss(scores_N: Tensor, choices_N: Tensor, last_N: Tensor, targets_N: Tensor) -> Tensor:
    """Binary cross entropy of a classifier's scores, before a sigmoid, summed over the tokens that have a target.

    `choices_N` and `last_N` are the likeliest tokens at the exit and at the last output (`head_loss` notes them).
    """
    wide_N = scores_N.to(torch.promote_types(scores_N.dtype, torch.float32))
    losses_N = F.binary_cross_entropy_with_logits(wide_N, (choices_N == last_N).to(wide_N.dtype), reduction="none")
    return torch.where(targets_N != IGNORE, losses_N, 0.0).sum()
