"""Where a model predicts while it trains: at its end, at early exits and by drafts; and what the loss there is made of."""

from __future__ import annotations

from dataclasses import dataclass

from fathomlm.depth import DepthPlan
from fathomlm.train.losses.exits import exit_depths, exit_steps, exit_weights
from fathomlm.train.losses.head import HeadTerms
from fathomlm.train.recipe import LossRecipe

FURTHER = 0.8
"""What a draft's loss counts, as a part of that of the draft before it: it is used only where that one was right."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """One place where the model predicts: after which step, and what its loss is made of."""

    index: int
    terms: HeadTerms
    name: str

    @property
    def parts(self) -> tuple[str, ...]:
        """What its losses are called, its cross entropy first."""
        early = "" if self.name == "next_token" else f"{self.name}_"
        return (self.name, *((f"{early}distill",) if self.terms.divergence is not None else ()))

    @property
    def classifier(self) -> str:
        """What its classifier's loss is called."""
        return f"{self.name}_classifier"


def loss_outputs(recipe: LossRecipe, plan: DepthPlan) -> tuple[LossOutput, ...]:
    """Shallow to deep; an exit is named by how many steps a token has run when it leaves."""
    distill = recipe.distill
    last_weight, early = 1.0, []
    if recipe.exits is not None:
        steps = exit_steps(recipe.exits, plan)
        *weights, last_weight = exit_weights(recipe.exits, exit_depths(recipe.exits, plan))
        for index, weight in zip(steps, weights, strict=True):
            share = weight * recipe.exits.distill_weight if recipe.exits.distill is not None else 0.0
            early.append(LossOutput(index, HeadTerms(weight, recipe.exits.distill, share), f"exit_{index + 1}"))
        for ahead in range(recipe.exits.draft):
            weight = recipe.exits.coefficient * FURTHER**ahead
            terms = HeadTerms(weight, recipe.exits.distill, weight * recipe.exits.distill_weight)
            early.append(LossOutput(plan.unrolled_layers + ahead, terms, f"draft_{ahead + 1}"))
    kind = None if distill is None else distill.kind
    share = 0.0 if distill is None else last_weight * distill.weight
    return (*early, LossOutput(plan.unrolled_layers - 1, HeadTerms(last_weight, kind, share), "next_token"))
