"""Hidden states drawn towards others: layerwise distillation and healing.

Layerwise distillation is between the two halves of a shallow-deep model (thesis 2.5.1).

The shallow model is the first L_S layers; its hidden states are drawn towards the deep model's by mean squared error, after
the final norm, the deep side detached. Which towards which:

    last             every shallow layer towards the last layer
    last_pair        the last shallow layer alone towards the last layer, as the public research code
    unif             every shallow layer towards its own of L_S layers at equal distances
    dyna             each of these L_S layers draws the shallow layer that is nearest to it, never going back
    dyna_equation    every shallow layer towards the one of these layers that is nearest to it, never going back

The thesis' sentence on KD-dyna, and the public research code, say `dyna`; its equation says `dyna_equation`. There the
candidates are layers of the whole model, and among those a shallow layer is nearest to itself, or to one that is shallow as
well: on SmolLM2-135M with 8 of 30 layers, [4, 4, 4, 4, 4, 4, 8, 8]. No teacher is then deeper than the exit, and the exit
is drawn nowhere. In the other direction every chosen layer teaches, the last one always.

Both choose for each row of the batch by itself. The thesis chooses once for what a GPU holds, which would make the loss
depend on how a batch is split; a row is the smallest unit that does not.

Healing: after layers were tied or dropped, each step's output is drawn towards what the teacher's layer in its place puts
out, so that every layer is told what it is for before the head can tell it.

A step's place ends in front of the base layer that the next step takes the place of. So the output of a step whose
followers were dropped is what those would have made of it, and the last one's is the teacher's last. Errors are relative to
the teacher's state, token by token: states of later layers are a hundred times as long as those of earlier ones. The last
pair is compared behind the final norms, where the head reads.

Shapes: B rows, T tokens, M hidden width, I shallow layers, J candidate deep layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError


def uniform_layers(shallow: int, layers: int) -> tuple[int, ...]:
    """As many of the layers 1..L as the shallow model has, at equal distances, the last one included."""
    if not 1 <= shallow < layers:
        raise OptionError(f"the shallow model must have 1 to {layers - 1} of the {layers} layers, got {shallow}")
    return tuple(round((i + 1) * layers / shallow) for i in range(shallow))


def candidates(mapping: str, shallow: int, layers: int) -> tuple[int, ...]:
    """The deep layers that a mapping may choose, counted from 1."""
    spread = uniform_layers(shallow, layers)
    return (layers,) if mapping in ("last", "last_pair") else spread


def taught_layers(mapping: str, shallow: int) -> tuple[int, ...]:
    """The shallow layers that take part, counted from 1."""
    return (shallow,) if mapping == "last_pair" else tuple(range(1, shallow + 1))


def squared_errors(shallow: Sequence[Tensor], deep: Sequence[Tensor], counted_BT: Tensor) -> Tensor:
    """Summed over a row's tokens and averaged over the width: one number for each row and pair of layers (B, I, J)."""
    rows = [torch.stack([_error(s, d, counted_BT) for d in deep], dim=-1) for s in shallow]
    return torch.stack(rows, dim=1)


def _error(a_BTM: Tensor, b_BTM: Tensor, counted_BT: Tensor) -> Tensor:
    return ((a_BTM.float() - b_BTM.float()).square().mean(-1) * counted_BT).sum(-1)


def monotone_map(errors_BIJ: Tensor) -> Tensor:
    """For each row the non-decreasing choice of j for every i whose summed error is least (B, I), by dynamic programming.

    best[i, j] is the least error of layers 0..i with layer i mapped to j; of equal choices the shallower is taken.
    """
    rows, layers = errors_BIJ.shape[:2]
    best = errors_BIJ[:, 0]
    came_from = []
    for i in range(1, layers):
        least, where = best.cummin(dim=-1)
        came_from.append(_first_of_equals(least, where))
        best = least + errors_BIJ[:, i]
    choice = torch.empty(rows, layers, dtype=torch.long, device=errors_BIJ.device)
    choice[:, -1] = best.argmin(dim=-1)
    for i in range(layers - 2, -1, -1):
        choice[:, i] = came_from[i].gather(1, choice[:, i + 1, None])[:, 0]
    return choice


def _first_of_equals(least_BJ: Tensor, where_BJ: Tensor) -> Tensor:
    """`cummin` names the latest of equal minima; the earliest keeps the mapping as shallow as the errors allow."""
    new = torch.ones_like(where_BJ, dtype=torch.bool)
    new[:, 1:] = least_BJ[:, 1:] < least_BJ[:, :-1]
    places = torch.arange(where_BJ.shape[1], device=where_BJ.device).expand_as(where_BJ)
    return torch.where(new, places, 0).cummax(dim=-1).values


def layerwise_loss(shallow: Sequence[Tensor], deep: Sequence[Tensor], counted_BT: Tensor, mapping: str) -> Tensor:
    """The mean over pairs of MSE(H_S, H_D), summed over tokens: a pair for each of the shallow layers, in `dyna` for each of
    the deep ones.

    `shallow` are the normed states of `taught_layers(...)`, `deep` those of `candidates(...)`.
    """
    deep = [d.detach() for d in deep]
    pairs: list[tuple[Tensor, Tensor]]
    if mapping in ("dyna", "dyna_equation"):
        rows = torch.arange(counted_BT.shape[0], device=counted_BT.device)
        with torch.no_grad():
            errors_BIJ = squared_errors(shallow, deep, counted_BT)
        if mapping == "dyna":
            choice, states = monotone_map(errors_BIJ.mT), torch.stack(list(shallow))
            pairs = [(states[choice[:, j], rows], d) for j, d in enumerate(deep)]
        else:
            choice, states = monotone_map(errors_BIJ), torch.stack(deep)
            pairs = [(s, states[choice[:, i], rows]) for i, s in enumerate(shallow)]
    else:
        pairs = list(zip(shallow, deep if mapping == "unif" else deep * len(shallow), strict=True))
    return torch.stack([_error(s, d, counted_BT).sum() for s, d in pairs]).sum() / len(pairs)


def teacher_steps(plan: DepthPlan, teacher: DepthPlan, kept: Sequence[int] | None) -> tuple[int, ...]:
    """For each step of a student the step of the teacher that it is compared with, by index. `kept` are the teacher's layers
    that a dropped model has."""
    layers = teacher.unrolled_layers
    places = range(layers) if kept is None else kept
    if teacher.recursions > 1 or len(places) != plan.base_layers or places[-1] >= layers:
        raise OptionError(
            f"loss.heal requires as its teacher the plain model that the student was made from (by model.recursions, "
            f"model.drop or `fathomlm convert`): the student stands for {plan.base_layers} layers, the teacher has {layers}"
        )
    ends = [min((place for place in places if place > own), default=layers) - 1 for own in places]
    found = [ends[step.origin] for step in plan]
    return (*found[:-1], layers - 1)


def healing_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], counted_BT: Tensor) -> Tensor:
    """The mean over pairs of |s - t|^2 / |t|^2, summed over tokens."""
    errors = [
        ((s.float() - t.float()).square().sum(-1) / t.float().square().sum(-1).clamp_min(1e-12) * counted_BT).sum()
        for s, t in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean()
