"""Optimizers and their parameter groups.

Tied layers are one module, so a shared weight is one parameter and is in one group, once. Norms, biases, offsets and
other vectors are left out of weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.recipe import OptimizerRecipe

EXITS = ("exit_heads.", "exit_adapters.", "exit_blocks.", "exit_classifiers.", "exit_gate.", "exit_draft.")
"""How the names of weights begin that belong to exits."""


def choose_trained(decoder: Decoder, what: str) -> None:
    """Freeze what does not learn: `all`, `relaxation` (what steps add, routers) or `exits` (what exits add; `exit_heads` is
    an older name of it).

    Frozen in any case is what no gradient reaches: a router's bias, which is moved by hand, and the k and v of steps that
    read another's entries, for which DDP would wait in vain.
    """
    idle = ("routers.bias", *_unread(decoder))
    groups = {"all": ("",), "relaxation": ("deltas.", "encodings.", "routers."), "exits": EXITS, "exit_heads": EXITS}
    found = 0
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name.startswith(groups[what]) and not name.startswith(idle))
        found += parameter.requires_grad
    if not found:
        exits = "no exits that add anything (loss.exits.adapter_rank, layer, head_rank, classifier or draft)"
        has = "no relaxation (model.relax)" if what == "relaxation" else exits
        raise OptionError(f"train: {what}, but the model has {has}, so nothing would learn")


def _unread(decoder: Decoder) -> Iterator[str]:
    """How the names of weights begin that make keys and values which no step attends to."""
    plan = decoder.plan
    if decoder.relaxation is not None and decoder.relaxation.method.makes_kv:
        return
    for layer in range(plan.unique_layers):
        if all(plan.reads_kv(step) for step in plan.uses(layer)):
            yield from (f"layers.{layer}.attn.{name}." for name in ("k", "v", "k_norm"))
    for step in plan:
        if plan.reads_kv(step):
            yield from (f"deltas.{step.index}.linears.{name}." for name in ("k", "v"))
            yield from (f"deltas.{step.index}.offsets.attn-{name}" for name in ("k", "v"))


def parameter_groups(module: nn.Module, weight_decay: float, aux_rate: float = 1.0) -> list[dict[str, object]]:
    """Matrices with decay, vectors without; auxiliary routers, whose rate is a part of the others'; only what learns."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    apart = [p for name, p in named if aux_rate != 1.0 and "routers.aux." in name]
    beside = {id(p) for p in apart}
    rest = [p for _, p in named if id(p) not in beside]
    groups = (
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        {"params": apart, "weight_decay": weight_decay, "rate": aux_rate},
    )
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, recipe: OptimizerRecipe, aux_rate: float = 1.0) -> Optimizer:
    groups = parameter_groups(module, recipe.weight_decay, aux_rate)
    if recipe.kind == "adafactor":
        # transformers' and not torch's: with these settings the rate is what it says (thesis 2: 1e-4), where torch's
        # multiplies it by each weight's own size.
        return Adafactor(groups, lr=recipe.lr, scale_parameter=False, relative_step=False, warmup_init=False)  # type: ignore[no-any-return]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.betas[0], recipe.betas[1]), eps=recipe.eps, fused=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate", 1.0)


STATE_BYTES = {"adamw": 16, "adafactor": 8}
"""Of each weight: itself, its gradient and the optimizer's state in float32; Adafactor's factored one is next to nothing."""


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, which, unlike its own numbering, means the same in every process."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
