"""What an exit's classifier learns: whether the exit chooses what the last output chooses (CALM, section 3.3).

Shapes: N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.train.data.loader import IGNORE


def agreement_loss(scores_N: Tensor, choices_N: Tensor, last_N: Tensor, targets_N: Tensor) -> Tensor:
    """Binary cross entropy of a classifier's scores, before a sigmoid, summed over the tokens that have a target.

    `choices_N` and `last_N` are the likeliest tokens at the exit and at the last output (`head_loss` notes them).
    """
    wide_N = scores_N.to(torch.promote_types(scores_N.dtype, torch.float32))
    losses_N = F.binary_cross_entropy_with_logits(wide_N, (choices_N == last_N).to(wide_N.dtype), reduction="none")
    return torch.where(targets_N != IGNORE, losses_N, 0.0).sum()
