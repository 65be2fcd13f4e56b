"""Healing: after layers were tied or dropped, each step's output is drawn towards what the teacher's layer in its place puts
out, so that every layer is told what it is for before the head can tell it.

A step's place ends in front of the base layer that the next step takes the place of. So the output of a step whose
followers were dropped is what those would have made of it, and the last one's is the teacher's last. Errors are relative to
the teacher's state, token by token: states of later layers are a hundred times as long as those of earlier ones. The last
pair is compared behind the final norms, where the head reads.

Shapes: B rows, T tokens, M hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError


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
    ends = [*(following - 1 for following in places[1:]), layers - 1]
    found = [ends[step.origin] for step in plan]
    return (*found[:-1], layers - 1)


def healing_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], counted_BT: Tensor) -> Tensor:
    """The mean over pairs of |s - t|^2 / |t|^2, summed over tokens."""
    errors = [
        ((s.float() - t.float()).square().sum(-1) / t.float().square().sum(-1).clamp_min(1e-12) * counted_BT).sum()
        for s, t in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean()
