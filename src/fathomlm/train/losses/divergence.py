"""Distances between a student's and a teacher's next-token distribution (thesis 3, appendix on knowledge distillation).

Each function takes log-probabilities in float32 and returns its value for each token together with its gradient with
respect to the student's logits. The gradients are written out: the chunked head needs them while a chunk's logits are
still there, and a compiler fuses these few lines into one pass over the vocabulary. With q = softmax(z),
dL/dz = q * (g - sum(q * g)) where g = dL/dq.

Shapes: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # recipes name these functions, and are read without torch
    from torch import Tensor

ValueAndGradient: TypeAlias = "tuple[Tensor, Tensor]"
"""Values (C) and gradients with respect to the student's logits (C, V)."""


def forward_kl(student_CV: Tensor, teacher_CV: Tensor) -> ValueAndGradient:
    """KL(teacher || student)."""
    p = teacher_CV.exp()
    return (p * (teacher_CV - student_CV)).sum(-1), student_CV.exp() - p


def reverse_kl(student_CV: Tensor, teacher_CV: Tensor) -> ValueAndGradient:
    """KL(student || teacher)."""
    q, gap = student_CV.exp(), student_CV - teacher_CV
    value = (q * gap).sum(-1)
    return value, q * (gap - value[:, None])


def jensen_shannon(student_CV: Tensor, teacher_CV: Tensor) -> ValueAndGradient:
    """(KL(teacher || m) + KL(student || m)) / 2 with m the mean of the two."""
    p, q = teacher_CV.exp(), student_CV.exp()
    mean = student_CV.logaddexp(teacher_CV) - math.log(2.0)
    own = student_CV - mean
    value = 0.5 * ((p * (teacher_CV - mean)).sum(-1) + (q * own).sum(-1))
    return value, 0.5 * q * (own - (q * own).sum(-1, keepdim=True))


def total_variation(student_CV: Tensor, teacher_CV: Tensor) -> ValueAndGradient:
    """Half the sum of absolute differences."""
    q = student_CV.exp()
    gap = q - teacher_CV.exp()
    slope = 0.5 * gap.sign()
    return 0.5 * gap.abs().sum(-1), q * (slope - (q * slope).sum(-1, keepdim=True))


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], ValueAndGradient]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
}
