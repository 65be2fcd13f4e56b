"""What tying takes away, and how much of it a relaxation of some rank would give back (thesis 3.3.3, SVD initialisation).

For each step of a plan the residual is the base layer in its place less the tied weight that it would share. A LoRA of rank
r that starts from the truncated SVD captures the r largest singular values, so the energy (sum of squares) that lies in
them says what rank is worth its parameters. Only steps whose layer is shared have a residual.

Nothing is converted: a tensor's group is read, tied, compared and let go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.assemble import BaseCheckpoint, ModelBase
from fathomlm.checkpoints.huggingface import read_config
from fathomlm.checkpoints.locate import locate
from fathomlm.checkpoints.native import is_native
from fathomlm.checkpoints.resolve import describe, load, open_base
from fathomlm.checkpoints.tying import WEIGHTS_ONLY, starting_layers
from fathomlm.depth import Architecture, DepthPlan, LinearSpec, Relaxation
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError, choices
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.model.relax.lora import residual_energies

SHARES = (0.5, 0.9, 0.99)
"""Parts of the energy whose rank is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """One linear at one step under one initialisation."""

    init: str
    linear: str
    step: int
    """From 1, in unrolled depth."""
    recursion: int
    """From 1."""
    full_rank: int
    energy: float
    """The residual's squared Frobenius norm."""
    relative: float
    """The residual's norm against that of the base layer's own weight."""
    captured: list[float]
    """By rank, from 1: the part of the energy in so many singular values. All ones where there is no residual."""

    def rank_for(self, share: float) -> int:
        """The smallest rank that captures this part; 0 where tying took nothing away."""
        if not self.energy:
            return 0
        return next(rank for rank, part in enumerate(self.captured, start=1) if part >= share - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank on every linear of every shared step."""

    rank: int
    captured: dict[str, float]
    """By initialisation: the part of all residual energy."""
    added_parameters: int
    non_embedding_parameters: int
    """Of the relaxed model."""
    relative_parameters: float
    """Against the untied base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNumbers:
    sharing: str
    recursions: int
    layout: str
    inits: list[str]
    linears: list[str]
    spectra: list[Spectrum]
    ranks: list[RankRow]

    def of(self, init: str, linear: str) -> list[Spectrum]:
        """By step."""
        return [each for each in self.spectra if each.init == init and each.linear == linear]

    def summary(self) -> dict[str, Any]:
        """Without spectra: for each initialisation and linear the ranks that parts of the energy need."""
        record = dataclasses.asdict(self)
        del record["spectra"]
        pairs = [(init, linear) for init in self.inits for linear in self.linears]
        return record | {"kinds": [{"init": init, "linear": linear, **self.sums(init, linear)} for init, linear in pairs]}

    def sums(self, init: str, linear: str) -> dict[str, Any]:
        """Over the steps: the mean relative norm, and the largest rank that any of them needs for each share."""
        spectra = self.of(init, linear)
        ranks = {f"rank_{round(100 * share)}": max(each.rank_for(share) for each in spectra) for share in SHARES}
        mean = sum(each.relative for each in spectra) / len(spectra)
        return {"full_rank": spectra[0].full_rank, "relative": mean, **ranks}


def open_plain(source: str | Path) -> BaseCheckpoint:
    """The base to tie: any plain model, read a tensor at a time where it lies in files."""
    path = locate(source)
    if path.is_dir() and is_native(read_config(path)):
        model = load(path)
        if model.plan.recursions > 1 or model.relaxation is not None:
            raise OptionError(f"{source} was converted already ({describe(model)}); analyze the plain model it came from")
        return ModelBase(model)
    return open_base(path)


def check_inits(inits: Sequence[str]) -> tuple[str, ...]:
    for init in inits:
        if init not in WEIGHTS_ONLY:
            raise OptionError(choices("init", init, WEIGHTS_ONLY))
    return tuple(dict.fromkeys(inits))


@torch.inference_mode()
def measure(
    base: BaseCheckpoint,
    plan: DepthPlan,
    inits: Sequence[str] = ("average", "stepwise"),
    *,
    on_linear: OnProgress = unwatched,
) -> WeightNumbers:
    """Spectra of all residuals. `on_linear` is called with (done, total)."""
    if plan.recursions < 2:
        raise OptionError("with one recursion nothing is tied, so there is no residual; give --recursions 2 or more")
    chosen, specs = check_inits(inits), base.architecture.linears()
    shared = sorted({step.layer for step in plan if plan.is_shared(step)})
    starts = {init: starting_layers(plan, init) for init in chosen}  # type: ignore[arg-type]
    spectra: list[Spectrum] = []
    total, done = len(shared) * len(specs), 0
    for layer in shared:
        for spec in specs:
            read = _Reader(base, f"{spec.path}.weight")
            for init in chosen:
                tied = read.mean(starts[init][layer])
                spectra += [
                    _spectrum(init, spec, step.index + 1, step.recursion + 1, read(step.origin), tied)
                    for step in plan.uses(layer)
                ]
            done += 1
            on_linear(done, total)
    spectra.sort(key=lambda each: (chosen.index(each.init), each.step))
    return WeightNumbers(
        sharing=plan.sharing,
        recursions=plan.recursions,
        layout=plan.layout,
        inits=list(chosen),
        linears=[spec.name for spec in specs],
        spectra=spectra,
        ranks=_rank_rows(base.architecture, plan, chosen, spectra),
    )


class _Reader:
    """One kind of weight over the base's layers, in float64, each read once."""

    def __init__(self, base: BaseCheckpoint, name: str) -> None:
        self._base, self._name = base, name
        self._read: dict[int, Tensor] = {}

    def __call__(self, layer: int) -> Tensor:
        if layer not in self._read:
            self._read[layer] = self._base.tensor(f"layers.{layer}.{self._name}").double()
        return self._read[layer]

    def mean(self, layers: Sequence[int]) -> Tensor:
        return torch.stack([self(layer) for layer in layers]).mean(0)


def _spectrum(init: str, spec: LinearSpec, step: int, recursion: int, own: Tensor, tied: Tensor) -> Spectrum:
    squares = residual_energies(own - tied)
    energy = float(squares.sum())
    captured = (squares.cumsum(0) / energy).clamp(max=1.0).tolist() if energy else [1.0] * len(squares)
    return Spectrum(
        init=init,
        linear=spec.name,
        step=step,
        recursion=recursion,
        full_rank=len(squares),
        energy=energy,
        relative=float((own - tied).norm() / own.norm().clamp_min(torch.finfo(own.dtype).tiny)),
        captured=captured,
    )


def _rank_rows(
    architecture: Architecture, plan: DepthPlan, inits: Sequence[str], spectra: Sequence[Spectrum]
) -> list[RankRow]:
    """Powers of two up to the largest full rank, which captures everything."""
    most = max(each.full_rank for each in spectra)
    ranks = [2**power for power in range(most.bit_length()) if 2**power < most]
    untied = count(architecture, DepthPlan.vanilla(architecture.layers)).non_embedding_parameters
    rows = []
    for rank in [*ranks, most]:
        relaxation = Relaxation(kind="lora", ranks={spec.name: rank for spec in architecture.linears()}, vectors=False)
        cost = count(architecture, plan, relaxation=relaxation)
        rows.append(
            RankRow(
                rank=rank,
                captured={init: _captured([each for each in spectra if each.init == init], rank) for init in inits},
                added_parameters=cost.relaxation_parameters,
                non_embedding_parameters=cost.non_embedding_parameters,
                relative_parameters=cost.non_embedding_parameters / untied,
            )
        )
    return rows


def _captured(spectra: Sequence[Spectrum], rank: int) -> float:
    whole = sum(each.energy for each in spectra)
    if not whole:
        return 1.0
    return sum(each.energy * each.captured[min(rank, each.full_rank) - 1] for each in spectra) / whole


def bands(numbers: WeightNumbers, init: str, linear: str) -> Mapping[str, list[float]]:
    """Captured energy by rank over the steps that have a residual: least, mean and most."""
    curves = [each.captured for each in numbers.of(init, linear) if each.energy] or [numbers.of(init, linear)[0].captured]
    columns = list(zip(*curves, strict=True))
    return {
        "least": [min(column) for column in columns],
        "mean": [sum(column) / len(column) for column in columns],
        "most": [max(column) for column in columns],
    }
