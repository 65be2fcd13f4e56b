"""Small moves on the tensors that recorded steps hand on (decode/recorded.py); compiled, each is one kernel instead of
several.

Shapes: N tokens of a pass, K places on the stack, M hidden width, V vocabulary.
"""

from __future__ import annotations

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


def settle(logits_1V: Tensor, choice_1: Tensor, told_2: Tensor) -> None:
    """Write the likeliest token, and `confidence.gap`, where the next step and the host find them."""
    best_and_gap(logits_1V, out=(choice_1, told_2[:1]))
    told_2[1:].copy_(choice_1)
