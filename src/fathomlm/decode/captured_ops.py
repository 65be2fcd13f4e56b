"""What recorded steps are made of (decode/recorded.py): attention masks, an encoder's output in a buffer of fixed size, and
small operations on the tensors that steps hand on, each one kernel when compiled.

Shapes: B sequences, S tokens of a source, N tokens of a pass, K places on the stack, M hidden width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.cache.static import StaticCache
from fathomlm.depth import Architecture, Step
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.model.attention_mask import AttentionMask, AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


def added_masks(
    architecture: Architecture,
    steps: Sequence[Step],
    rows: TokenBatch,
    dtype: torch.dtype,
    queries_BN: Tensor,
    keys_BK: Tensor,
) -> AttentionMasks:
    """`gathered_masks`, masks as what is added to scores, which attention would otherwise make of them at every layer."""
    masks = gathered_masks(architecture, steps, rows, dtype, queries_BN, keys_BK=keys_BK)
    return {
        window: AttentionMask(
            attention.cos, attention.sin, _added(attention.mask, dtype), attention.causal, attention.memory
        )
        for window, attention in masks.items()
    }


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def room_for(source: int, decoder: Decoder) -> EncoderMemory:
    """Room for an encoder's output of at most `source` tokens, of one row."""
    weight = decoder.embed.weight
    shape = (1, source, decoder.architecture.memory_width)
    states_1SM = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
    return EncoderMemory(states_1SM, torch.ones(1, source, dtype=torch.bool, device=weight.device), look=False)


def refill(room: EncoderMemory, memory: EncoderMemory, decoder: Decoder, rows: TokenBatch, cache: StaticCache) -> None:
    """Put an encoder's output into its room, with the keys and values that each step makes of it."""
    assert room.keep_BS is not None
    S = memory.states_BSM.shape[1]
    room.keep_BS.fill_(False)
    room.keep_BS[:, :S] = True if memory.keep_BS is None else memory.keep_BS
    room.states_BSM.zero_()
    room.states_BSM[:, :S] = memory.states_BSM
    fresh = EncoderMemory(room.states_BSM, room.keep_BS, look=False)
    rows = dataclasses.replace(rows, memory=fresh)
    weight, steps = decoder.embed.weight, decoder.plan.steps
    slots_1 = torch.full((1,), cache.scratch, device=weight.device)
    cache.focus(slots_1)
    masks = gathered_masks(decoder.architecture, steps, rows, weight.dtype, slots_1[None], keys_BK=rows.positions_BT)
    # What comes out does not matter: each step makes what it keeps of the source.
    decoder.run_steps(decoder.enter(torch.zeros_like(slots_1)[None]), steps, masks, cache)
    for step in steps:
        held, new = room.at(step, keeps=True), fresh.at(step, keeps=True)
        assert new.k is not None
        assert new.v is not None
        if held.k is None or held.v is None:
            held.k, held.v = new.k.clone(), new.v.clone()
        else:
            held.k.copy_(new.k)
            held.v.copy_(new.v)


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
        choice_1, result_2 = chosen
        choice_1.copy_(choices_N.index_select(0, count_1))
        result_2[1:].copy_(choice_1)
    slots_K.fill_(scratch)
    count_1.fill_(-1)


def judge(
    choices_K: Tensor, drafts_K2: Tensor, choice_1: Tensor, slot_1: Tensor, count_1: Tensor, slots_K: Tensor, scratch: int,
    results_3K: Tensor,
) -> None:  # fmt: skip
    """Of drafts that all ran: go back to the last token that the full model would have chosen too, or to what it chooses in
    the place of the first other one; that is the next to run. The stack is empty then. The host gets the drafts, their
    confidences, and the full model's choices."""
    K = choices_K.shape[0]
    drafts_K = drafts_K2[:, 1].long()
    places_K = torch.arange(K, device=choices_K.device)
    taken_1 = torch.where(drafts_K == choices_K, K - 1, places_K).amin(0, keepdim=True)
    choice_1.copy_(choices_K.index_select(0, taken_1))
    slot_1.add_(taken_1 - (K - 1))
    results_3K[0].copy_(drafts_K2[:, 0])
    results_3K[1].copy_(drafts_K)
    results_3K[2].copy_(choices_K)
    slots_K.fill_(scratch)
    count_1.fill_(-1)


def settle(logits_1V: Tensor, choice_1: Tensor, result_2: Tensor) -> None:
    """Write the most likely token, and `confidence.gap`, where the next step and the host find them."""
    best_and_gap(logits_1V, out=(choice_1, result_2[:1]))
    result_2[1:].copy_(choice_1)
