"""What looped layers start as, and what each step then lacks of the base layer in its place (thesis 3.3.2, 3.3.3).

A mean of several layers' weights may be plain, or weighted by the activations of each: the W that minimises the sum of
|(W - W_i) x|^2 over the inputs x that layer i reads is (sum W_i C_i) (sum C_i)^-1, with C_i the mean of x x^T (RegMean). The
neurons of a feed-forward part have no order, so they are matched with the first layer's before they are averaged.

Under a budget, ranks go to the linears whose deltas are worth their bytes. A rank more on a linear restores, at each step,
the next singular value of what tying lost there; with the second moments of its inputs that is a part of what comes out of
it. Each is counted against what the base layer's linear puts out, so that linears compare. Singular values fall, so taking
the best ranks for their parameters again and again is the best choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.assemble import BaseCheckpoint, OnProgress, telling
from fathomlm.checkpoints.tying import Init, NormInit
from fathomlm.depth import Architecture, DepthPlan, Relaxation, Step
from fathomlm.depth.cost import count, relaxation_parameters
from fathomlm.errors import OptionError
from fathomlm.model.relax.lora import damped, energy, residual_energies

ROWS, COLUMNS = ("mlp.gate", "mlp.up"), ("mlp.down",)
"""Linears of the feed-forward part that have a neuron in each output, and in each input."""

QUANTUM = 8
"""Ranks grow by this, up to the whole matrix: what a GPU multiplies well."""


@dataclass(frozen=True, slots=True)
class Tying:
    """The tensors of looped layers, made when they are asked for."""

    base: BaseCheckpoint
    init: Init
    norm: NormInit
    starts: Sequence[tuple[int, ...]]
    """For each looped layer, the base layers that it is made of."""
    activations: Activations | None
    orders: dict[int, Tensor]
    """For some base layers, the order that their neurons are brought into."""

    @classmethod
    def of(
        cls, base: BaseCheckpoint, init: Init, norm: NormInit, starts: Sequence[tuple[int, ...]], found: Activations | None
    ) -> Tying:
        orders: dict[int, Tensor] = {}
        if init == "aligned":
            assert found is not None
            if base.architecture.experts:
                raise OptionError("init 'aligned' matches the neurons of one feed-forward part; this model has experts")
            for first, *others in (group for group in starts if len(group) > 1):
                orders |= {other: neuron_order(base, first, other, found) for other in others}
        return cls(base, init, norm, starts, found, orders)

    def tensor(self, layer: int, name: str) -> Tensor:
        """The tied tensor: one base layer's own, bit for bit, or the mean of several in float32."""
        starts, is_norm = self.starts[layer], "norm" in name
        if is_norm and len(starts) > 1 and self.norm == "zero":
            return torch.zeros_like(self._read(starts[0], name))
        if is_norm and self.norm == "choice":
            starts = starts[:1]
        if len(starts) == 1:
            return self._read(starts[0], name)
        if self.init == "aligned" and (linear := self._linear(name)) is not None:
            return weighted_mean([(self._read(start, name), self._moment(start, linear)) for start in starts])
        total = self._read(starts[0], name).float().clone()
        for other in starts[1:]:
            total += self._read(other, name).float()
        return total / len(starts)

    def residual(self, step: Step, name: str, tied: Tensor) -> Tensor:
        """The base layer at this depth, less the tied weight as it is stored."""
        return self._read(step.origin, name).float() - tied.float()

    def moment(self, step: Step, name: str) -> Tensor | None:
        """The second moments of what the base layer in a step's place reads through a tensor, where they are known."""
        linear = self._linear(name)
        return None if linear is None or self.activations is None else self._moment(step.origin, linear)

    def _read(self, layer: int, name: str) -> Tensor:
        tensor, path = self.base.tensor(f"layers.{layer}.{name}"), name.rpartition(".")[0]
        if layer not in self.orders or path not in (*ROWS, *COLUMNS):
            return tensor
        if path in ROWS:
            return tensor[self.orders[layer]]
        return tensor[:, self.orders[layer]] if tensor.dim() > 1 else tensor

    def _moment(self, layer: int, linear: str) -> Tensor:
        assert self.activations is not None
        moment = self.activations.moment(layer, linear)
        if layer not in self.orders or linear != "down":
            return moment
        return moment[self.orders[layer]][:, self.orders[layer]]

    def _linear(self, name: str) -> str | None:
        path, _, end = name.rpartition(".")
        return next((s.name for s in self.base.architecture.linears() if s.path == path and end == "weight"), None)


def weighted_mean(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Of weights with the second moments of their inputs, in float32."""
    moments = [damped(moment) for _, moment in parts]
    total = torch.stack([weight.double() @ moment for (weight, _), moment in zip(parts, moments, strict=True)]).sum(0)
    solved: Tensor = torch.linalg.solve(torch.stack(moments).sum(0), total, left=False)
    return solved.float()


def neuron_order(base: BaseCheckpoint, first: int, other: int, activations: Activations) -> Tensor:
    """The order of `other`'s feed-forward neurons in which each stands where the one of `first` stands that it is most
    like: by what they compute from the activations, and by what they add to the residual stream."""
    moment = (damped(activations.moment(first, "up")) + damped(activations.moment(other, "up"))).float()
    likeness = torch.zeros(())
    for path in (*ROWS, *COLUMNS):
        if path == "mlp.gate" and not base.architecture.gated:
            continue
        a, b = (base.tensor(f"layers.{layer}.{path}.weight").float() for layer in (first, other))
        a, b, weighted = (a, b, moment) if path in ROWS else (a.T, b.T, None)
        likeness = likeness + _cosines(a, b, weighted)
    return greedy_matches(likeness)


def _cosines(a: Tensor, b: Tensor, moment: Tensor | None) -> Tensor:
    """Between all rows of two matrices, in the metric of a moment."""
    across = b.T if moment is None else moment @ b.T
    sizes = [((m * m).sum(1) if moment is None else ((m @ moment) * m).sum(1)).clamp_min(1e-30).sqrt() for m in (a, b)]
    return (a @ across) / sizes[0][:, None] / sizes[1]


def greedy_matches(likeness: Tensor) -> Tensor:
    """For each row a column of its own: the most alike pair first, then the most alike of the rest, and so on. Pairs that
    are each other's best can be taken together, which needs few rounds."""
    left = likeness.clone()
    order = torch.full((len(left),), -1, dtype=torch.long)
    taken = torch.finfo(left.dtype).min
    while bool((order < 0).any()):
        best_column, best_row = left.argmax(1), left.argmax(0)
        rows = torch.arange(len(left))
        rows = rows[(best_row[best_column] == rows) & (order < 0)]
        order[rows] = best_column[rows]
        left[rows] = taken
        left[:, best_column[rows]] = taken
    return order


def check_room_for_ranks(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation, limit: int) -> int:
    """The parameters that `limit` leaves to ranks; refused where not even the smallest ones fit."""
    room = limit - count(architecture, plan).parameters
    smallest = ({name: min(QUANTUM, most)} for name, most in _full_ranks(architecture).items())
    least = min(_price(architecture, plan, relaxation, ranks) for ranks in smallest)
    if least > room:
        raise OptionError(
            f"the budget is {limit:,} parameters, but tied and with the smallest {relaxation.kind} the model has "
            f"{limit - room + least:,}; give a larger budget or more recursions"
        )
    return room


def _full_ranks(architecture: Architecture) -> dict[str, int]:
    return {spec.name: min(spec.inputs, spec.outputs) for spec in architecture.linears()}


def _price(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation, ranks: dict[str, int]) -> int:
    named = {name: rank for name, rank in ranks.items() if rank}
    return relaxation_parameters(architecture, plan, dataclasses.replace(relaxation, ranks=named))


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
    room = check_room_for_ranks(architecture, plan, relaxation, limit)
    full = _full_ranks(architecture)
    ranks = dict.fromkeys(full, 0)
    energies = _energies(tying, plan, aware, dtype, on_layer)
    used = 0
    while True:
        more = {name: {**ranks, name: min(rank + QUANTUM, full[name])} for name, rank in ranks.items() if rank < full[name]}
        prices = {name: _price(architecture, plan, relaxation, grown) for name, grown in more.items()}
        fits = {name: price for name, price in prices.items() if price <= room}
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
    for layer in telling(shared, on_layer):
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
