"""The gate's loss: what a token is expected to cost over the exits where the gate may let it go, less a part of how
undecided the gate is about them (Ouro; Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models").

    p(i) = g(i) * prod_{j < i} (1 - g(j))          the last output takes what is left
    loss = sum_i p(i) CE(i) - entropy * H(p)

The cross entropies teach the gate, and the gate's probabilities weigh what each loop learns. The entropy keeps it from
settling on one loop before the loops differ.

Shapes: N tokens, E early exits, O = E + 1 outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def exit_log_probabilities(scores_NE: Tensor) -> Tensor:
    """log p over the outputs, (N, O), from the gate's scores at the early exits, before the sigmoid."""
    stays_NE = F.logsigmoid(-scores_NE).cumsum(-1)
    reached_NE = F.pad(stays_NE[:, :-1], (1, 0))
    return torch.cat((F.logsigmoid(scores_NE) + reached_NE, stays_NE[:, -1:]), dim=-1)


def exit_entropy(log_p_NO: Tensor) -> Tensor:
    """H(p) of each token."""
    return -(log_p_NO.exp() * log_p_NO).sum(-1)


def expected_exit(log_p_NO: Tensor) -> Tensor:
    """The output that each token is expected to exit at, from 1."""
    return (log_p_NO.exp() * torch.arange(1, log_p_NO.shape[1] + 1, device=log_p_NO.device)).sum(-1)
