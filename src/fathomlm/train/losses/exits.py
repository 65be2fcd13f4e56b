"""How much each exit's loss counts (thesis 2, equation of the weighted cross entropy; thesis 3, early-exit training)."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.train.losses.layerskip import summed_depth_weights
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
    if recipe.weights == "gate":  # says it token by token: losses/gate.py
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
