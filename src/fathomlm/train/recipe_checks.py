"""What no recipe can mean, refused before any work is done: bounds of single fields stand beside them (`recipe.py`)."""

from __future__ import annotations

from fathomlm.errors import OptionError
from fathomlm.options import check
from fathomlm.train.recipe import Recipe, parse_amount

AMOUNTS = ("budget.tokens", "budget.steps", "budget.epochs", "budget.flops", "batch.tokens", "data.max_tokens")


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no run could mean, each with the field, the rule and the value."""
    check(recipe)
    model, loss, exits = recipe.model, recipe.loss, recipe.loss.exits
    starts = [n for n in ("source", "shape", "architecture") if getattr(model, n) is not None]
    if len(starts) != 1:
        raise OptionError(f"model requires one of source, shape and architecture, got {_given('model', starts)}")
    budgets = [n for n in ("tokens", "steps", "epochs", "flops") if getattr(recipe.budget, n) is not None]
    if len(budgets) != 1:
        raise OptionError(f"budget requires one of tokens, steps, epochs and flops, got {_given('budget', budgets)}")
    if recipe.budget.steps is not None and parse_amount("budget.steps", recipe.budget.steps) % 1:
        raise OptionError(f"budget.steps must be an integer, got {recipe.budget.steps}")
    batches = [n for n in ("tokens", "sequences") if getattr(recipe.batch, n) is not None]
    if len(batches) != 1:
        raise OptionError(f"batch requires one of tokens and sequences, got {_given('batch', batches)}")
    if len(recipe.optimizer.betas) != 2:
        raise OptionError(f"optimizer.betas requires two numbers, got {recipe.optimizer.betas}")
    if recipe.capture and recipe.recompute not in ("none", "inner"):
        raise OptionError(f"capture cannot be combined with recompute: {recipe.recompute}; it requires none or inner")
    if loss.distill is not None and not loss.distill.source:
        raise OptionError("loss.distill requires a source, the teacher")
    if model.router is not None and (loss.exits is not None or loss.layerwise is not None):
        raise OptionError(
            "loss.exits and loss.layerwise cannot be combined with model.router: a routed model has one output"
        )
    if loss.routing is not None:
        if loss.routing.capacity_per_document and not recipe.data.document_mask:
            raise OptionError("loss.routing.capacity_per_document requires data.document_mask")
        if loss.routing.capacity_warmup_shape == "smooth" and not loss.routing.capacity_warmup:
            raise OptionError("loss.routing.capacity_warmup_shape: smooth requires loss.routing.capacity_warmup")
    if len(recipe.data.pairs) not in (0, 2):
        raise OptionError(f"data.pairs names two fields, source and target, got {recipe.data.pairs}")
    if recipe.data.source_prefix and not recipe.data.pairs:
        raise OptionError("data.source_prefix requires data.pairs")
    if recipe.train == "relaxation" and model.relax is None and model.source is None:
        raise OptionError("train: relaxation requires model.relax")
    if recipe.train == "exit_heads" and (loss.exits is None or loss.exits.head_rank < 1):
        raise OptionError("train: exit_heads requires loss.exits.head_rank >= 1")
    if recipe.train == "exits" and (
        exits is None or not (exits.head_rank or exits.adapter_rank or exits.layer or exits.classifier)
    ):
        raise OptionError(
            "train: exits requires something that exits add: loss.exits.adapter_rank, layer, head_rank or classifier"
        )
    if exits is not None and exits.exit_vocab and not recipe.exits_only:
        raise OptionError(
            f"loss.exits.exit_vocab requires train: exits, got train: {recipe.train}; exits copy their rows of "
            "the head, which must not learn"
        )
    for name in AMOUNTS:
        section, field = name.split(".")
        value = getattr(getattr(recipe, section), field)
        if value is not None:
            parse_amount(name, value)


def _given(section: str, names: list[str]) -> str:
    if not names:
        return "none"
    return f"{' and '.join(names)}; null takes one out, such as --{section}.{names[-1]} null"
