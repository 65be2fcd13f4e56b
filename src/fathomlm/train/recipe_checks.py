"""What no recipe can mean, said before any work is done."""

from __future__ import annotations

from typing import Any

from fathomlm.errors import OptionError
from fathomlm.train.recipe import Recipe, parse_amount

LEAST = {
    "model.recursions": 1,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip": 0,
    "optimizer.nonfinite_limit": 1,
    "schedule.warmup": 0,
    "schedule.cooldown": 0,
    "loss.distill.weight": 0,
    "loss.exits.coefficient": 0,
    "loss.exits.distill_weight": 0,
    "loss.exits.head_rank": 0,
    "loss.exits.adapter_rank": 0,
    "loss.exits.exit_vocab": 0,
    "loss.layerwise.weight": 0,
    "loss.routing.coefficient": 0,
    "loss.routing.z": 0,
    "loss.routing.bias_rate": 0,
    "loss.routing.capacity_warmup": 0,
    "loss.routing.aux_lr": 0,
    "model.kv_loops": 1,
    "evaluate.every": 0,
    "evaluate.rows": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 0,
    "log.every": 1,
    "hardware.count": 1,
}
"""The lowest value of each number that has one."""


def check(recipe: Recipe) -> None:
    """Refuse what no run could mean, each with the field, the rule and the value."""
    model, loss = recipe.model, recipe.loss
    starts = [n for n in ("source", "shape", "architecture") if getattr(model, n) is not None]
    if len(starts) != 1:
        raise OptionError(f"model needs one of source, shape and architecture, got {_given('model', starts)}")
    budgets = [n for n in ("tokens", "steps", "epochs", "flops") if getattr(recipe.budget, n) is not None]
    if len(budgets) != 1:
        raise OptionError(f"budget needs one of tokens, steps, epochs and flops, got {_given('budget', budgets)}")
    if recipe.budget.steps is not None and parse_amount("budget.steps", recipe.budget.steps) % 1:
        raise OptionError(f"budget.steps must be an integer, got {recipe.budget.steps}")
    batches = [n for n in ("tokens", "sequences") if getattr(recipe.batch, n) is not None]
    if len(batches) != 1:
        raise OptionError(f"batch needs one of tokens and sequences, got {_given('batch', batches)}")
    if len(recipe.optimizer.betas) != 2:
        raise OptionError(f"optimizer.betas needs two numbers, got {recipe.optimizer.betas}")
    if not all(0 <= beta < 1 for beta in recipe.optimizer.betas):
        raise OptionError(f"optimizer.betas must be from 0 to below 1, got {recipe.optimizer.betas}")
    if recipe.capture and recipe.recompute not in ("none", "inner"):
        raise OptionError(
            f"capture goes with recompute none or inner, got {recipe.recompute}; making activations again cannot be recorded"
        )
    _positive("data.context", recipe.data.context)
    _positive("batch.micro", recipe.batch.micro)
    _positive("optimizer.lr", recipe.optimizer.lr)
    if loss.distill is not None and not loss.distill.source:
        raise OptionError("loss.distill needs a source, the teacher")
    if loss.layerwise is not None:
        _positive("loss.layerwise.shallow", loss.layerwise.shallow)
    if model.router is not None and (loss.exits is not None or loss.layerwise is not None):
        raise OptionError("a routed model has one output: loss.exits and loss.layerwise do not go with model.router")
    if loss.routing is not None:
        if loss.routing.capacity_per_document and not recipe.data.document_mask:
            raise OptionError("loss.routing.capacity_per_document requires data.document_mask")
        if loss.routing.capacity_warmup_shape == "smooth" and not loss.routing.capacity_warmup:
            raise OptionError("loss.routing.capacity_warmup_shape: smooth requires loss.routing.capacity_warmup")
    if loss.chunk is not None:
        _positive("loss.chunk", loss.chunk)
    if len(recipe.data.pairs) not in (0, 2):
        raise OptionError(f"data.pairs names two fields, source and target, got {recipe.data.pairs}")
    if recipe.data.source_prefix and not recipe.data.pairs:
        raise OptionError("data.source_prefix stands in front of a pair's source; it goes with data.pairs")
    if recipe.train == "relaxation" and model.relax is None and model.source is None:
        raise OptionError("train: relaxation needs model.relax")
    if recipe.train == "exit_heads" and (loss.exits is None or loss.exits.head_rank < 1):
        raise OptionError("train: exit_heads needs loss.exits.head_rank of at least 1")
    exits = loss.exits
    if recipe.train == "exits" and (
        exits is None or not (exits.head_rank or exits.adapter_rank or exits.layer or exits.classifier)
    ):
        raise OptionError(
            "train: exits needs something that exits add: loss.exits.adapter_rank, layer, head_rank or classifier"
        )
    if exits is not None and exits.exit_vocab and not recipe.exits_only:
        raise OptionError(
            f"loss.exits.exit_vocab requires train: exits, got train: {recipe.train}; exits copy their rows of "
            "the head, which must not learn"
        )
    for name, least in LEAST.items():
        value = _field(recipe, name)
        if value is not None and not least <= value < float("inf"):
            raise OptionError(f"{name} must be >= {least}, got {value}")
    for name in ("budget.tokens", "budget.steps", "budget.epochs", "budget.flops", "batch.tokens", "data.max_tokens"):
        value = _field(recipe, name)
        if value is not None:
            parse_amount(name, value)


def _field(recipe: Recipe, name: str) -> Any:
    """A field by its dotted name; None where a section on the way is left out."""
    value: Any = recipe
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _given(section: str, names: list[str]) -> str:
    if not names:
        return "none"
    return f"{' and '.join(names)}; null takes one out, such as --{section}.{names[-1]} null"


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise OptionError(f"{name} must be > 0, got {value}")
