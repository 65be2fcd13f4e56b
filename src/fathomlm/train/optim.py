"""Optimizers and their parameter groups.

Tied layers are one module, so a shared weight is one parameter and is in one group, once. Norms, biases, offsets and
other vectors are left out of weight decay. Muon moves the matrices of layers, and AdamW all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from fathomlm.errors import OptionError, TrainingError
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


def parameter_groups(module: nn.Module, weight_decay: float, aux_rate: float = 1.0) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without; auxiliary routers, whose rate is a part of the others'; only what learns."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    apart = [p for name, p in named if aux_rate != 1.0 and "routers.aux." in name]
    beside = {id(p) for p in apart}
    rest = [p for _, p in named if id(p) not in beside]
    groups: tuple[dict[str, Any], ...] = (
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        {"params": apart, "weight_decay": weight_decay, "rate": aux_rate},
    )
    return [group for group in groups if group["params"]]


class MuonAdamW(Optimizer):
    """torch's Muon for the matrices of layers beside AdamW for the rest, as one optimizer.

    Both keep their state in one mapping, and the groups are theirs, so that rates and checkpoints need not know of two.
    Updates have AdamW's size (`match_rms_adamw`), so that a rate means the same for both.
    """

    def __init__(self, module: nn.Module, recipe: OptimizerRecipe, groups: list[dict[str, Any]]) -> None:
        matrices = [p for name, p in module.named_parameters() if p.requires_grad and moved_by_muon(name, p.shape)]
        if not matrices:
            raise OptionError("optimizer.kind: muon, but no matrix of a layer learns; use optimizer.kind: adamw")
        ours = {id(p) for p in matrices}
        rest = [group | {"params": [p for p in group["params"] if id(p) not in ours]} for group in groups]
        decay = recipe.weight_decay
        muon = torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self._parts: list[Optimizer] = [muon]
        if left := [group for group in rest if group["params"]]:
            self._parts.append(adamw(left, recipe))
        self.defaults, self.state = muon.defaults, muon.state
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)


def moved_by_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether this is a matrix of one of the decoder's layers; embeddings, heads, routers and what steps add are not, which
    have rows or columns of their own meaning, nor are encoders, which are transformers' own."""
    return len(shape) == 2 and "layers" in name.split(".") and "deltas" not in name.split(".")


def adamw(groups: list[dict[str, Any]], recipe: OptimizerRecipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.betas[0], recipe.betas[1]), eps=recipe.eps, fused=True)


def build_optimizer(module: nn.Module, recipe: OptimizerRecipe, aux_rate: float = 1.0) -> Optimizer:
    groups = parameter_groups(module, recipe.weight_decay, aux_rate)
    if recipe.kind == "muon":
        return MuonAdamW(module, recipe, groups)
    if recipe.kind == "adafactor":
        # transformers' and not torch's: with these settings the rate is what it says (thesis 2: 1e-4), where torch's
        # multiplies it by each weight's own size.
        return Adafactor(groups, lr=recipe.lr, scale_parameter=False, relative_step=False, warmup_init=False)  # type: ignore[no-any-return]
    return adamw(groups, recipe)


def check_sharded(recipe: OptimizerRecipe, parallel: str) -> None:
    """Refuse an optimizer that needs whole matrices where each rank has rows of them."""
    if parallel == "fsdp" and recipe.kind != "adamw":
        raise TrainingError(f"{recipe.kind} does not support sharded weights; use parallel: ddp or optimizer.kind: adamw")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate", 1.0)


STATE_BYTES = {"adamw": 16, "muon": 12, "adafactor": 8}
"""Of each weight: itself, its gradient and the optimizer's state in float32. Muon's is one moment (AdamW's two beside it
are of few weights), and Adafactor's factored one is next to nothing."""


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, which, unlike its own numbering, means the same in every process."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
