"""Optimizers and their parameter groups.

Tied layers are one module, so a shared weight is one parameter and is in one group, once. Norms, biases, offsets and
other vectors are left out of weight decay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from fathomlm.errors import OptionError
from fathomlm.train.recipe import OptimizerRecipe


def choose_trained(decoder: nn.Module, what: str) -> None:
    """Freeze what does not learn: `all`, `relaxation` (what steps add) or `exit_heads` (what exits add to the head)."""
    groups = {"all": ("",), "relaxation": ("deltas.", "encodings."), "exit_heads": ("exit_heads.",)}
    found = 0
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name.startswith(groups[what]) and name != "routers.bias")  # moved by hand, not by gradient
        found += parameter.requires_grad
    if not found:
        has = "no relaxation (model.relax)" if what == "relaxation" else "no exit heads (loss.exits.head_rank)"
        raise OptionError(f"train: {what}, but the model has {has}, so nothing would learn")


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


def state_bytes_per_weight(kind: str) -> int:
    """Weights, gradients and optimizer state in float32; Adafactor's factored state is next to nothing."""
    return {"adamw": 16, "adafactor": 8}[kind]


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, which, unlike its own numbering, means the same in every process."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
