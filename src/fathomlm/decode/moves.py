"""Small moves on the tensors that recorded steps hand on (decode/recorded.py); compiled, each is one kernel instead of
several.

Shapes: N tokens of a pass, K places on the stack, M hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.best_token import best_and_gap


def move_on(slot_1: Tensor, count_1: Tensor) -> None:
    """The last choice is the token to run, a slot further, and a place further on the stack."""
    slot_1.add_(1)
    count_1.add_(1)


def push(states_KM: Tensor, slots_K: Tensor, count_1: Tensor, x_1M: Tensor, slot_1: Tensor) -> None:
    """A state and its slot onto the stack, at the place `count_1`."""
    states_KM.index_copy_(0, count_1, x_1M)
    slots_K.index_copy_(0, count_1, slot_1)


def clear(
    choices_N: Tensor, kept_K: Tensor, slots_K: Tensor, count_1: Tensor, scratch: int, chosen: tuple[Tensor, Tensor] | None
) -> None:
    """Keep what a deep pass chose, and empty the stack; `chosen` are the places for what it chose for the last token, which
    is the next one to run."""
    kept_K[: choices_N.shape[0]].copy_(choices_N)
    if chosen is not None:
        choice_1, told_2 = chosen
        choice_1.copy_(choices_N.index_select(0, count_1))
        told_2[1:].copy_(choice_1)
    slots_K.fill_(scratch)
    count_1.fill_(-1)


def judge(
    choices_K: Tensor, drafts_K2: Tensor, choice_1: Tensor, slot_1: Tensor, count_1: Tensor, slots_K: Tensor, scratch: int,
    told_3K: Tensor,
) -> None:  # fmt: skip
    """Of drafts that all ran: go back to the last token that the whole model would have chosen too, or to what it chooses in
    the place of the first other one; that is the next to run. The stack is empty then. The host is told how sure the drafts
    were, what they are, and what the whole model chose."""
    K = choices_K.shape[0]
    drafts_K = drafts_K2[:, 1].long()
    places_K = torch.arange(K, device=choices_K.device)
    taken_1 = torch.where(drafts_K == choices_K, K - 1, places_K).amin(0, keepdim=True)
    choice_1.copy_(choices_K.index_select(0, taken_1))
    slot_1.add_(taken_1 - (K - 1))
    told_3K[0].copy_(drafts_K2[:, 0])
    told_3K[1].copy_(drafts_K)
    told_3K[2].copy_(choices_K)
    slots_K.fill_(scratch)
    count_1.fill_(-1)


def settle(logits_1V: Tensor, choice_1: Tensor, told_2: Tensor) -> None:
    """Write the likeliest token, and `confidence.gap`, where the next step and the host find them."""
    best_and_gap(logits_1V, out=(choice_1, told_2[:1]))
    told_2[1:].copy_(choice_1)
