"""Ranks under a budget: which linear's deltas are worth their bytes.

A rank more on a linear restores, at each step, the next singular value of what tying lost there; with the second moments of
its inputs that is a part of what comes out of it. Each is counted against what the base layer's linear puts out, so that
linears compare. Singular values fall, so taking the best ranks for their parameters again and again is the best choice.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fathomlm.checkpoints.assemble import OnProgress
from fathomlm.checkpoints.tied import Tying
from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.depth.cost import count, relaxation_parameters
from fathomlm.errors import OptionError
from fathomlm.model.relax.lora import energy, residual_energies

QUANTUM = 8
"""Ranks grow by this, up to the whole matrix: what a GPU multiplies well."""


def ranks_within(
    tying: Tying,
    plan: DepthPlan,
    relaxation: Relaxation,
    limit: int,
    *,
    aware: bool,
    dtype: torch.dtype,
    on_layer: OnProgress | None = None,
) -> Relaxation:
    """`relaxation` (LoRA or DoRA) with the ranks that restore most where the whole model has at most `limit` parameters.
    `aware` counts by activations; `dtype` is what tied weights are stored in."""
    architecture = tying.base.architecture
    room = limit - count(architecture, plan).parameters
    full = {spec.name: min(spec.inputs, spec.outputs) for spec in architecture.linears()}

    def price(ranks: dict[str, int]) -> int:
        named = {name: rank for name, rank in ranks.items() if rank}
        return relaxation_parameters(architecture, plan, dataclasses.replace(relaxation, ranks=named))

    ranks = dict.fromkeys(full, 0)
    least = min(price({name: min(QUANTUM, most)}) for name, most in full.items())
    if least > room:
        whole = limit - room + least
        raise OptionError(
            f"the budget is {limit:,} parameters, but tied and with the smallest {relaxation.kind} the model has {whole:,}; "
            "give a larger budget or more recursions"
        )
    energies = _energies(tying, plan, aware, dtype, on_layer)
    used = 0
    while True:
        more = {name: {**ranks, name: min(rank + QUANTUM, full[name])} for name, rank in ranks.items() if rank < full[name]}
        fits = {name: cost for name, grown in more.items() if (cost := price(grown)) <= room}
        if not fits:
            return dataclasses.replace(relaxation, ranks={name: rank for name, rank in ranks.items() if rank})
        gains = {name: float(energies[name][ranks[name] : more[name][name]].sum()) for name in fits}
        best = max(fits, key=lambda name: gains[name] / (fits[name] - used))
        ranks, used = more[best], fits[best]


def _energies(
    tying: Tying, plan: DepthPlan, aware: bool, dtype: torch.dtype, on_layer: OnProgress | None
) -> dict[str, Tensor]:
    """For each linear what each rank restores over all steps, as parts of what the base layers put out."""
    found: dict[str, Tensor] = {}
    shared = sorted({step.layer for step in plan if plan.is_shared(step)})
    for done, layer in enumerate(shared):
        if on_layer is not None:
            on_layer(done, len(shared))
        for spec in tying.base.architecture.linears():
            name = f"{spec.path}.weight"
            tied = tying.tensor(layer, name).to(dtype)
            for step in plan.uses(layer):
                residual = tying.residual(step, name, tied)
                moment = tying.moment(step, name) if aware else None
                whole = energy(residual + tied.float(), moment)
                part = residual_energies(residual, moment) / whole.clamp_min(torch.finfo(whole.dtype).tiny)
                found[spec.name] = found.get(spec.name, torch.zeros_like(part)) + part
    return found
